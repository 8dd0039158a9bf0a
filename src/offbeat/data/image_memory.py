"""Images of a Python program, in rows in memory, as data URIs, so that the rows can be written as JSON. Called by `api.rows`.

An image of Pillow and an array of pixels are written as PNG, which keeps every value; bytes of a file and paths stay what they are.
"""

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from offbeat.data.image_sources import ImageSource
from offbeat.errors import DataError
from offbeat.extras import require

_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_MOST_CHANNELS = 4


def as_uris(value: Any) -> Any:
    """Return a value of a row with its images as data URIs or paths, at any depth; other values stay.

    Raises:
        DataError: an array is none of pixels.
        MissingExtraError: Pillow is needed and not installed.
    """
    if isinstance(value, ImageSource):
        return value.path or _uri(value.data)
    if isinstance(value, bytes | bytearray) and bytes(value).startswith(_MAGIC):
        return _uri(bytes(value))
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (2, 3):
        return _uri(_png(value))
    if isinstance(value, Mapping):
        return {name: as_uris(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_uris(each) for each in value]
    return _uri(_saved(value)) if type(value).__module__.startswith("PIL.") and hasattr(value, "save") else value


def _uri(data: bytes) -> str:
    return f"data:image/*;base64,{base64.b64encode(data).decode()}"


def _saved(image: Any) -> bytes:
    file = io.BytesIO()
    image = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else image.convert("RGB")
    image.save(file, format="PNG")
    return file.getvalue()


def _png(pixels: np.ndarray) -> bytes:
    """Return pixels, [H, W] or [H, W, C] uint8 with C of 1, 3 or 4, as a file."""
    require("images", ["PIL"], wanted_by="an array as an image")
    from PIL import Image  # noqa: PLC0415 - an optional dependency

    if pixels.ndim == 3 and (pixels.shape[2] not in (1, 3, _MOST_CHANNELS) or not pixels.size):
        raise DataError(f"an array of pixels must have the shape [height, width, 1, 3 or 4], got {pixels.shape}; transpose it")
    return _saved(Image.fromarray(pixels[:, :, 0] if pixels.shape[2:] == (1,) else pixels))
