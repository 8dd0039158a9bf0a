"""The image process: decodes images, and computes the model's inputs with its own processor. Started by `data.image_reader`.

It answers requests on its standard input with frames on its standard output. Nothing else decodes or resizes an image in a run.
"""

import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from offbeat.data import wire
from offbeat.data.image_decode import decode_image
from offbeat.data.image_reader import FAMILIES, MadeImage, read_frame, write_frame
from offbeat.data.image_sources import ImageLimits
from offbeat.errors import DataError, describe
from offbeat.user_code.boundary import Caught

_PICTURE_SIDE = 256
"""Most pixels along a side of the picture that people are shown."""


@dataclass(frozen=True)
class Made:
    """An image as a processor makes it: `tokens` for a prompt, image tokens as placeholders; `arrays`, the tower's inputs by name."""

    tokens: list[int]
    arrays: dict[str, Any]
    grid: tuple[int, int] = (0, 0)


class Processor:
    """The processor of a model folder, of one of `image_reader.FAMILIES`."""

    def __init__(self, folder: str, *, model_type: str, image_token_id: int) -> None:
        from transformers import AutoConfig, AutoImageProcessor  # noqa: PLC0415 - takes seconds, and only this process needs it

        self._token_id = image_token_id
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        images: Any = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
        self._make: Callable[[Any], Made] = _MAKERS[model_type](folder, config, images)

    def make(self, data: bytes, limits: ImageLimits) -> MadeImage:
        """Decode an image and process it; a fault is in the answer."""
        with Caught() as caught:  # processors raise errors of any kind for images that they cannot use
            return self._made(decode_image(data, limits))
        exc = caught.take()
        refused = f"is refused by the model's processor ({describe(exc)}); leave it out"
        return MadeImage(str(exc) if isinstance(exc, DataError) else refused, np.zeros(0, np.int32), {})

    def _made(self, image: Any) -> MadeImage:
        made = self._make(image)
        arrays = {name: np.asarray(array) for name, array in made.arrays.items()}
        arrays = {name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in arrays.items()}
        tokens = np.where(np.array(made.tokens) == self._token_id, -1, made.tokens).astype(np.int32)
        return MadeImage("", tokens, arrays, made.grid, image.size, _picture(image))


def _tiles(folder: str, config: Any, images: Any) -> Callable[[Any], Made]:
    """Idefics3 and SmolVLM: tiles of a large image in rows, with tokens between them, and the whole image, made small."""
    from transformers import AutoTokenizer  # noqa: PLC0415
    from transformers.models.idefics3 import Idefics3Processor  # noqa: PLC0415

    # SmolVLM's own processor writes the same tokens, and needs packages for videos.
    whole: Any = Idefics3Processor(images, AutoTokenizer.from_pretrained(folder, local_files_only=True), image_seq_len=_square(
        config.vision_config.image_size, config.vision_config.patch_size) // config.scale_factor**2)

    def make(image: Any) -> Made:
        made = whole(text=[whole.image_token], images=[[image]], add_special_tokens=False)
        return Made(made["input_ids"][0], {name: made[name] for name in ("pixel_values", "pixel_attention_mask") if name in made})

    return make


def _patches(_folder: str, config: Any, images: Any) -> Callable[[Any], Made]:
    """Qwen-VL: patches of one image, of which squares of a few become a placeholder."""

    def make(image: Any) -> Made:
        made = images(images=[image])
        _, rows, columns = (int(size) // images.merge_size for size in made["image_grid_thw"][0])
        arrays = {name: made[name] for name in ("pixel_values", "image_grid_thw")}
        return Made([config.image_token_id] * (rows * columns), arrays, (rows, columns))

    return make


def _square_of(_folder: str, config: Any, images: Any) -> Callable[[Any], Made]:
    """Gemma 3: one square of a fixed number of placeholders."""

    def make(image: Any) -> Made:
        made = images(images=[image])
        if any(made.get("num_crops") or ()):
            raise DataError("is cut into crops by the processor (do_pan_and_scan), which is not supported; set do_pan_and_scan to false")
        inner = [config.image_token_id] * config.mm_tokens_per_image
        return Made([config.boi_token_index, *inner, config.eoi_token_index], {"pixel_values": made["pixel_values"]})

    return make


def _crops(folder: str, config: Any, images: Any) -> Callable[[Any], Made]:
    """InternVL: tiles of a large image one after the other, and the whole image, made small."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    first, last = (
        tokenizer.convert_tokens_to_ids(getattr(tokenizer, name, usual))
        for name, usual in (("start_image_token", "<img>"), ("end_image_token", "</img>")))

    def make(image: Any) -> Made:
        pixels = np.asarray(images(images=[image], crop_to_patches=True)["pixel_values"])
        inner = [config.image_token_id] * (config.image_seq_length * len(pixels))
        return Made([first, *inner, last], {"pixel_values": pixels})

    return make


def _any_resolution(_folder: str, config: Any, images: Any) -> Callable[[Any], Made]:
    """LLaVA-OneVision: the whole image, made small, and tiles of it without their padding, each row of patches with a token at its end."""
    from transformers.models.llava_onevision import LlavaOnevisionProcessor  # noqa: PLC0415

    size, patch = config.vision_config.image_size, config.vision_config.patch_size
    counter: Any = object.__new__(LlavaOnevisionProcessor)  # made in the usual way, it needs packages for videos
    vars(counter).update(image_processor=images, num_image_tokens=_square(size, patch), vision_aspect_ratio=config.vision_aspect_ratio)

    def make(image: Any) -> Made:
        made = images(images=[image])
        count = counter._get_number_of_features(image.height, image.width, size, size)
        count -= config.vision_feature_select_strategy == "default"
        return Made([config.image_token_id] * count, {name: made[name] for name in ("pixel_values", "image_sizes")})

    return make


_MAKERS: dict[str, Callable[[str, Any, Any], Callable[[Any], Made]]] = {
    "gemma3": _square_of, "idefics3": _tiles, "internvl": _crops, "llava_onevision": _any_resolution, "qwen2_5_vl": _patches,
    "qwen2_vl": _patches, "qwen3_vl": _patches, "qwen3_vl_moe": _patches, "smolvlm": _tiles}

assert set(_MAKERS) == set(FAMILIES), "what is read can be made"


def _square(size: int, patch: int) -> int:
    """Return the number of patches in a square image."""
    return (size // patch) ** 2


def _picture(image: Any) -> bytes:
    small, file = image.copy(), io.BytesIO()
    small.thumbnail((_PICTURE_SIDE, _PICTURE_SIDE))
    small.save(file, format="PNG")
    return file.getvalue()


def main(folder: str, model_type: str, image_token_id: str) -> None:
    """Answer requests until the standard input ends; each is `ImageLimits` and the bytes of a file, as two frames."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    processor = Processor(folder, model_type=model_type, image_token_id=int(image_token_id))
    write_frame(answers, b"ready")
    while limits := read_frame(sys.stdin.buffer):
        made = processor.make(read_frame(sys.stdin.buffer), wire.decode(ImageLimits, limits))
        write_frame(answers, wire.encode(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
