"""What the image process makes of images equals what transformers' own processors make of whole prompts."""

import io

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.idefics3 import Idefics3Processor

from image_models import file_of, make_folder, picture
from offbeat.data.image_process import Processor
from offbeat.data.image_sources import ImageLimits, ImageSource
from offbeat.data.image_store import FIRST_ID
from offbeat.data.tokenizer import load_tokenizer
from shared_image_reader import reader_in_process


def opened(folder, family):
    hf = AutoTokenizer.from_pretrained(folder)
    return Processor(str(folder), model_type=family, image_token_id=hf.convert_tokens_to_ids("<image>")), hf


def test_gemma3_writes_line_breaks_around_its_squares(tmp_path):
    folder = make_folder(tmp_path / "model", "gemma3")
    reader = reader_in_process(folder, tmp_path / "images")
    tokenizer = load_tokenizer(folder)
    first, inner, _, last = (tokenizer.hf.convert_tokens_to_ids(token) for token in ("<image>", "<video>", "<img>", "</img>"))
    whole, origins = reader.expand(tokenizer.encode("a\n<image>b"), [ImageSource(data=file_of(picture()))])
    expected = [*tokenizer.encode("a\n\n\n"), first, *[inner] * 4, last, *tokenizer.encode("\n\nb")]
    assert np.where(whole >= FIRST_ID, inner, whole).tolist() == expected
    assert origins[[0, -1]].tolist() == [0, 3] and set(origins[2:-1].tolist()) == {2}
    assert np.diff(origins).min() >= 0


@pytest.mark.parametrize(("family", "splits", "counts"), [
    ("internvl", False, [4, 4]), ("internvl", True, [4, 4 * (2 + 1)]),
    ("llava_onevision", False, [16 + 4 * (6 + 1), 16 + 4 * (8 + 1)])])  # rows and columns of patches without padding, and a row's end
def test_tiles_have_placeholders_as_the_image_has_sides(tmp_path, family, splits, counts):
    processor, hf = opened(make_folder(tmp_path, family, splits=splits), family)
    for size, count in zip([(40, 28), (64, 30)], counts, strict=True):
        made = processor.make(file_of(picture(size=size)), ImageLimits())
        assert made.fault == ""
        around = [hf.convert_tokens_to_ids(token) for token in ("<img>", "</img>")] if family == "internvl" else []
        assert made.tokens.tolist() == [*around[:1], *[-1] * count, *around[1:]], (size, len(made.tokens))


@pytest.mark.parametrize("splits", [False, True])
def test_idefics3_is_processed_as_a_whole_prompt_would_be(tmp_path, splits):
    processor, hf = opened(make_folder(tmp_path, "idefics3", splits=splits), "idefics3")
    image = picture(size=(60, 44))
    made = processor.make(file_of(image), ImageLimits())
    assert made.fault == ""
    assert made.size == (60, 44)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(made.picture))), np.asarray(image))
    whole = Idefics3Processor(AutoImageProcessor.from_pretrained(tmp_path, backend="pil"), hf, image_seq_len=4)
    expected = whole(text=["user: <image>how many?"], images=[[image]], add_special_tokens=False)
    token = whole.image_token_id
    around = [hf.encode(text, add_special_tokens=False) for text in ("user: ", "how many?")]
    assert [*around[0], *np.where(made.tokens == -1, token, made.tokens), *around[1]] == list(expected["input_ids"][0])
    assert np.array_equal(made.arrays["pixel_values"], np.asarray(expected["pixel_values"], np.float32))
    assert (made.tokens == -1).sum() == (4 * (2 * 2 + 1) if splits else 4)


def test_qwen2_5_vl_has_a_placeholder_for_each_merged_patch(tmp_path):
    processor, _ = opened(make_folder(tmp_path, "qwen2_5_vl"), "qwen2_5_vl")
    made = processor.make(file_of(picture(size=(400, 280))), ImageLimits())
    assert Image.open(io.BytesIO(made.picture)).size == (256, 179), "of large images, a smaller one is shown"
    made = processor.make(file_of(picture()), ImageLimits())
    assert made.arrays["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert (made.grid, made.tokens.tolist()) == ((2, 3), [-1] * 6)
    expected = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(images=[picture()])
    assert np.array_equal(made.arrays["pixel_values"], np.asarray(expected["pixel_values"], np.float32))


def test_a_fault_is_an_answer(tmp_path):
    processor, _ = opened(make_folder(tmp_path, "qwen2_5_vl"), "qwen2_5_vl")
    assert processor.make(b"text", ImageLimits()).fault.startswith("is no image")
    narrow = processor.make(file_of(picture(size=(1000, 2))), ImageLimits())
    assert not narrow.picture
    assert narrow.fault.startswith("is refused by the model's processor")
