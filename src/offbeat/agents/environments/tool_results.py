"""What a tool returned, as the text and the images of a message. Called by `tools`."""

import base64
import json
from collections.abc import Mapping
from typing import Any

from offbeat.chat.image_parts import Shown, join_parts
from offbeat.data.image_memory import as_uris
from offbeat.data.image_sources import MARK, ImageSource, image_of

_CHANNELS = (3, 4)


def shown_result(value: Any) -> Shown:
    """Return a tool's result: a text as it is, images, both in the order of a list that has images, and other values as JSON.

    An image is one of Pillow, an array of pixels [height, width, 3 or 4] of uint8, the bytes of a file, or an `ImageSource`.
    """
    if isinstance(value, str):
        return Shown(value)
    parts = [image_in(each) or each for each in (value if isinstance(value, list | tuple) else [value])]
    if not any(isinstance(part, ImageSource) for part in parts):
        return Shown(_json(value))
    return join_parts(
        [part if isinstance(part, ImageSource) else (part if isinstance(part, str) else _json(part)).replace(MARK, "") for part in parts],
        "the result of a tool")


def image_in(value: Any) -> ImageSource | None:
    """Return the image that a value is; None if it is none."""
    if isinstance(value, ImageSource):
        return value
    if isinstance(value, str | Mapping | list | tuple):
        return None
    if hasattr(value, "ndim") and not (value.ndim == len("HWC") and value.shape[2] in _CHANNELS and str(value.dtype) == "uint8"):
        return None
    uri = as_uris(value)
    return image_of(uri, "the result of a tool") if isinstance(uri, str) and uri.startswith("data:image/") else None


def image_of_mcp(part: Any) -> ImageSource | None:
    """Return the image of a part of a result as MCP has it; None if it is none."""
    data = getattr(part, "data", None)
    return ImageSource(data=base64.b64decode(data)) if getattr(part, "type", "") == "image" and isinstance(data, str) else None


def _json(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)
