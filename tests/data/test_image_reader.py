"""Images of rows in prompts: expanded once, found again, and refused with their row."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from image_models import file_of, make_folder, picture
from offbeat.config.data import DataConfig
from offbeat.config.load import load_config
from offbeat.config.train import SftConfig
from offbeat.controller.inputs import open_mixed, read_base
from offbeat.data.image_reader import images_for, same_images
from offbeat.data.image_sources import ImageLimits, ImageSource
from offbeat.data.image_store import FIRST_ID, ImageStore
from offbeat.data.pieces import Pieces
from offbeat.data.prompt import render
from offbeat.data.row import Row, parse_record
from offbeat.data.supervised import Supervision
from offbeat.data.tokenizer import load_tokenizer
from offbeat.errors import DataError
from shared_image_reader import ReaderInProcess, reader_in_process


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("models") / "idefics3", "idefics3")


@pytest.fixture
def tokenizer(folder, tmp_path):
    reader = reader_in_process(folder, tmp_path / "images")
    return replace(load_tokenizer(folder), images=reader)


def row_of(*images, text="how many?"):
    parts = [{"type": "image", "image": file_of(image)} for image in images]
    record = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}, {"role": "assistant", "content": "3"}]}
    return parse_record(record, DataConfig(), where="'f.jsonl', line 3")


def test_a_prompt_holds_each_image_by_its_id(tokenizer):
    ids = np.array(render(row_of(picture(0), picture(1)), tokenizer, DataConfig()))
    images = [tokenizer.images.store.get(int(index)) for index in dict.fromkeys(ids[ids >= FIRST_ID].tolist())]
    assert len(images) == 2
    start = len(tokenizer.encode("user: "))
    assert ids[start : start + 2 * len(images[0].tokens)].tolist() == [*images[0].tokens, *images[1].tokens]
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False).count(images[1].label) >= 1
    assert "how many?" in tokenizer.decode(ids.tolist())
    pieces = Pieces(tokenizer).split(ids.tolist())
    assert pieces.count(images[0].label) == 1


def test_an_image_is_processed_once(tokenizer, folder):
    row = row_of(picture(0))
    first = render(row, tokenizer, DataConfig())
    assert render(row, tokenizer, DataConfig()) == first
    again = replace(tokenizer, images=reader_in_process(folder, tokenizer.images.store.folder))
    assert render(row_of(picture(0)), again, DataConfig()) == first
    assert (tokenizer.images.num_made, again.images.num_made) == (1, 0)


@pytest.mark.parametrize(("family", "patches"), [("idefics3", 16), ("internvl", 16), ("qwen2_vl", 6 * 4)])
def test_the_patches_of_an_image_are_those_that_its_tower_computes(tmp_path, family, patches):
    reader = reader_in_process(make_folder(tmp_path / family, family), tmp_path / "images")
    image = reader.read(ImageSource(data=file_of(picture(0, size=(42, 28)))), "an image")
    assert reader.num_patches(image) == patches
    assert family != "qwen2_vl" or len(image.arrays["pixel_values"]) == patches


def test_supervision_trains_on_the_answer_after_an_image(tokenizer):
    supervision = Supervision(tokenizer, DataConfig(), SftConfig(), 512, 512)
    [(tokens, mask)] = supervision.sequences(row_of(picture(0)), name="row 0")
    assert tokens[~mask].tolist() == render(row_of(picture(0)), tokenizer, DataConfig())
    assert tokenizer.decode(tokens[mask].tolist(), skip_special_tokens=False) == "3<eos>"


def test_a_text_prompt_holds_images_too(tokenizer):
    row = parse_record({"prompt": "<image>how many?", "answer": "3", "images": [file_of(picture(0))]}, DataConfig(), where="row")
    ids = render(row, tokenizer, DataConfig(chat_template=False))
    assert sum(index >= FIRST_ID for index in ids) == 4
    assert tokenizer.decode(ids).endswith("how many?")


@pytest.mark.parametrize(("row", "said"), [
    (lambda: row_of(picture(0), text="the <image> there"), "has 2 image tokens for its 1 images"),
    (lambda: Row("an <image>", "3"), "has 1 image tokens for its 0 images"),
    (lambda: replace(row_of(picture(0)), images=(ImageSource(data=b"text"),)), "a row: image 1 is no image"),
    (lambda: replace(row_of(picture(0)), images=(ImageSource(path="nowhere.png"),)), "cannot be read from 'nowhere.png'"),
    (lambda: row_of(*[picture(0)] * 5), "allowed are data.max_images = 4"),
])
def test_what_cannot_be_expanded_is_refused(tokenizer, row, said):
    with pytest.raises(DataError, match=said):
        render(row(), tokenizer, DataConfig(chat_template=False))


def test_a_model_that_reads_no_images_refuses_them(folder, tmp_path):
    with pytest.raises(DataError, match="1 images, which are not read for"):
        render(row_of(picture(0)), load_tokenizer(folder), DataConfig())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert images_for(str(tmp_path), ImageStore(tmp_path), ImageLimits()) is None  # without a processor
    (tmp_path / "processor_config.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "fuyu"}))
    assert images_for(str(tmp_path), ImageStore(tmp_path), ImageLimits()) is None


def test_a_bad_image_is_an_unusable_row_with_its_place(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("offbeat.data.image_reader.ImageReader", ReaderInProcess)
    (tmp_path / "good.png").write_bytes(file_of(picture(0)))
    (tmp_path / "bad.png").write_bytes(file_of(picture(0))[:300])
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(
        json.dumps({"prompt": "?", "answer": "3", "images": [f"{name}.png"]}) + "\n" for name in ("good", "bad", "good")))
    values = {"model.path": str(folder), "data.path": str(rows), "data.heldout_size": "0", "run.dir": str(tmp_path / "runs")}
    config = load_config(None, list((values | {"data.max_unusable_rows": "1"}).items()))
    refused = []
    train, _ = open_mixed(config, read_base(config), supervised=False, refused=refused)
    assert train.num_rows == 2
    assert len(refused) == 1 and refused[0].startswith(f"{str(rows)!r}, line 2: image 1 cannot be decoded")
    with pytest.raises(DataError, match="line 2: image 1 cannot be decoded"):
        config = load_config(None, list(values.items()))
        open_mixed(config, read_base(config), supervised=False, refused=[])


@pytest.mark.drill
def test_the_image_process_answers_and_survives_what_ends_it(folder, tmp_path):
    reader = images_for(str(folder), ImageStore(tmp_path), ImageLimits())
    try:
        image = reader.read(ImageSource(data=file_of(picture(0))), "row 1")
        assert image.digest == reader_in_process(folder, tmp_path / "other").read(ImageSource(data=file_of(picture(0))), "row 1").digest
        with pytest.raises(DataError, match="row 2 is no image"):
            reader.read(ImageSource(data=b"text"), "row 2")
        reader._child.kill()
        with pytest.raises(DataError, match="ends the image process"):
            reader.read(ImageSource(data=file_of(picture(1))), "row 3")
        assert reader.read(ImageSource(data=file_of(picture(2))), "row 4").size == (40, 28)
    finally:
        reader.close()


def test_threads_that_read_the_same_image_make_it_once(tokenizer):
    source = ImageSource(data=file_of(picture(0)))
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: tokenizer.images.read(source, "it"), range(32)))
    assert len({image.id for image in found}) == 1 and tokenizer.images.num_made == 1


def test_folders_that_make_the_same_of_an_image_are_told(folder, tmp_path):
    same, other = make_folder(tmp_path / "same", "idefics3"), make_folder(tmp_path / "other", "smolvlm")
    assert same_images(str(folder), str(same)) and not same_images(str(folder), str(other))
    (same / "preprocessor_config.json").write_text("{}")
    assert not same_images(str(folder), str(same))
