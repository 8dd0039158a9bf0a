"""The image process: decodes images, and makes of each what the model gets, with the model's own processor. Started by `data.image_reader`.

It answers requests on its standard input with frames on its standard output. Nothing else decodes or resizes an image in a run.
"""

import io
import os
import sys
from typing import Any

import numpy as np

from offbeat.data import wire
from offbeat.data.image_decode import decode_image
from offbeat.data.image_reader import MadeImage, read_frame, write_frame
from offbeat.data.image_sources import ImageLimits
from offbeat.errors import DataError, describe
from offbeat.user_code.boundary import Caught

_PICTURE_SIDE = 256
"""Most pixels along a side of the picture that people are shown."""


class Processor:
    """The processor of a model folder, of one of `image_reader.FAMILIES`."""

    def __init__(self, folder: str, *, model_type: str, image_token_id: int) -> None:
        from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer  # noqa: PLC0415 - takes seconds, and only this process needs it
        from transformers.models.idefics3 import Idefics3Processor  # noqa: PLC0415

        self._token_id = image_token_id
        self._images: Any = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
        self._whole: Any = None
        if model_type == "idefics3":
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
            self._whole = Idefics3Processor(
                self._images, AutoTokenizer.from_pretrained(folder, local_files_only=True), image_seq_len=patches // config.scale_factor**2)

    def make(self, data: bytes, limits: ImageLimits) -> MadeImage:
        """Decode an image and process it; a fault is in the answer."""
        with Caught() as caught:  # processors raise errors of any kind for images that they cannot use
            return self._made(decode_image(data, limits))
        exc = caught.take()
        refused = f"is refused by the model's processor ({describe(exc)}); leave the row out"
        return _fault(str(exc) if isinstance(exc, DataError) else refused)

    def _made(self, image: Any) -> MadeImage:
        if self._whole is not None:
            made = self._whole(text=[self._whole.image_token], images=[[image]], add_special_tokens=False)
            tokens = np.array(made["input_ids"][0])
            arrays = {name: np.asarray(made[name]) for name in ("pixel_values", "pixel_attention_mask") if name in made}
            grid = (0, 0)
        else:
            made = self._images(images=[image])
            arrays = {name: np.asarray(made[name]) for name in ("pixel_values", "image_grid_thw")}
            _, rows, columns = (int(size) for size in arrays["image_grid_thw"][0])
            grid = rows // self._images.merge_size, columns // self._images.merge_size
            tokens = np.full(grid[0] * grid[1], self._token_id)
        arrays = {name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in arrays.items()}
        tokens = np.where(tokens == self._token_id, -1, tokens).astype(np.int32)
        return MadeImage("", tokens, arrays, grid, image.size, _picture(image))


def _picture(image: Any) -> bytes:
    small, file = image.copy(), io.BytesIO()
    small.thumbnail((_PICTURE_SIDE, _PICTURE_SIDE))
    small.save(file, format="PNG")
    return file.getvalue()


def _fault(text: str) -> MadeImage:
    return MadeImage(text, np.zeros(0, np.int32), {})


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
