"""Small models that read images, with tokenizers and processors, and pictures for them."""

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from offbeat.data.tokenizer import DEFAULT_ALPHABET, character_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}")
_SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *(
    f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)))


def picture(seed: int = 0, *, size: tuple[int, int] = (40, 28), mode: str = "RGB") -> Image.Image:
    """Return a picture of random pixels, which no two seeds share."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def file_of(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    """Return the bytes of an image's file."""
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def dots(count: int, colour: str, seed: int = 0) -> Image.Image:
    """Return a white picture with dots of a colour."""
    image, random = Image.new("RGB", (32, 32), "white"), np.random.default_rng(seed)
    draw = ImageDraw.Draw(image)
    for place in random.permutation(16)[:count]:
        x, y = 8 * (place % 4), 8 * (place // 4)
        draw.ellipse((x + 1, y + 1, x + 6, y + 6), fill=colour)
    return image


def make_folder(folder: Path, family: str, *, splits: bool = False, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a small random model of a family, "idefics3" or "qwen2_5_vl", with tokenizer and processor."""
    import torch  # noqa: PLC0415 - tests of data need none

    tokenizer = character_tokenizer(DEFAULT_ALPHABET, chat_template=TEMPLATE)
    hf = tokenizer.hf
    hf.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    hf.save_pretrained(folder)
    torch.manual_seed(seed)
    text = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": len(hf), "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": None,
        "eos_token_id": hf.eos_token_id, "pad_token_id": hf.pad_token_id}
    model, processor = {"idefics3": _idefics3, "qwen2_5_vl": _qwen2_5_vl}[family](
        text, hf.convert_tokens_to_ids("<image>"), splits=splits)
    for name, parameter in model.named_parameters():  # larger than the small standard deviation of the families, so that images matter
        if parameter.ndim > 1 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def _idefics3(text, image_token, *, splits):
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration  # noqa: PLC0415

    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    config = Idefics3Config(
        text_config={"model_type": "llama", **text}, vision_config=vision, scale_factor=2, image_token_id=image_token,
        pad_token_id=text["pad_token_id"], tie_word_embeddings=False)
    processor = {
        "image_processor_type": "Idefics3ImageProcessor", "processor_class": "Idefics3Processor", "do_image_splitting": splits,
        "size": {"longest_edge": 64 if splits else 32}, "max_image_size": {"longest_edge": 32}, "image_seq_len": 4}
    return Idefics3ForConditionalGeneration(config), processor


def _qwen2_5_vl(text, image_token, *, splits):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration  # noqa: PLC0415

    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 7,
        "spatial_merge_size": 2, "window_size": 28, "fullatt_block_indexes": [1], "temporal_patch_size": 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
    config = Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope}, vision_config=vision, image_token_id=image_token, video_token_id=image_token + 1,
        vision_start_token_id=image_token + 2, tie_word_embeddings=False)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", "patch_size": 7, "merge_size": 2,
        "temporal_patch_size": 2, "size": {"shortest_edge": 14 * 14, "longest_edge": 42 * 42}}
    return Qwen2_5_VLForConditionalGeneration(config), processor
