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
_SPECIAL = ("<image>", "<video>", "<img>", "</img>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *(
    f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)))

_NAMED = {
    "gemma3": {"image_token": "<video>", "boi_token": "<image>", "eoi_token": "</img>"},
    "internvl": {
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<image>", "video_token": "<video>"}}
"""Names of tokens for transformers' processors, which vLLM makes at its start."""
_BESIDE = {"llava_onevision": {
    "num_image_tokens": 16, "vision_feature_select_strategy": "full", "image_token": "<image>", "video_token": "<video>"}}
"""Settings of these processors beside those of their images."""


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


def make_folder(
    folder: Path, family: str, *, splits: bool = False, seed: int = 0, dtype: str = "float32", alphabet: str = DEFAULT_ALPHABET,
    head_dim: int = 8,
) -> Path:
    """Write a small random model of a family of `image_reader.FAMILIES`, with tokenizer and processor; vLLM needs a head_dim of 32."""
    import torch  # noqa: PLC0415 - tests of data need none

    from image_families import MAKERS  # noqa: PLC0415

    tokenizer = character_tokenizer(alphabet, chat_template=TEMPLATE)
    hf = tokenizer.hf
    hf.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    hf.save_pretrained(folder)
    named = folder / "tokenizer_config.json"
    named.write_text(json.dumps(json.loads(named.read_text()) | _NAMED.get(family, {})))
    torch.manual_seed(seed)
    text = {
        "hidden_size": 4 * head_dim, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": head_dim,
        "vocab_size": len(hf), "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": None,
        "eos_token_id": hf.eos_token_id, "pad_token_id": hf.pad_token_id}
    model, processor = MAKERS[family](text, hf.convert_tokens_to_ids("<image>"), splits)
    for name, parameter in model.named_parameters():  # larger than the small standard deviation of the families, so that images matter
        if parameter.ndim > 1 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    if family in _BESIDE:
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": processor["processor_class"], **_BESIDE[family]}))
    return folder
