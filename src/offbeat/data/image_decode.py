"""The pixels of an image file, upright and in RGB, or one sentence why there are none. Needs Pillow, the extra `images`.

Called in the image process (`data.image_process`), so that a file that crashes the library costs no run. An image is refused by its header
before its pixels are unpacked.
"""

import io
import struct

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from offbeat.data.image_sources import ImageLimits
from offbeat.errors import DataError, first_line

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MAX_SIDE = 16_384
"""Most pixels of a side; processors refuse or distort images that are so long."""
Image.MAX_IMAGE_PIXELS = None  # the bound is here
_WIDE = ("I", "I;16", "I;16B", "I;16L", "I;16N")
_MOST_16_BITS = 65_535


def decode_image(data: bytes, limits: ImageLimits) -> Image.Image:
    """Return an image in RGB: turned upright by its EXIF orientation, transparency over white, 16 bits scaled to 8.

    Raises DataError, the end of a sentence about it such as "is animated, ...", if it cannot be used.
    """
    if len(data) > limits.max_bytes:
        raise DataError(f"has {len(data)} bytes, allowed are {limits.told('max_image_bytes')}")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        _check_header(image, limits)
        image.load()
        return _in_rgb(ImageOps.exif_transpose(image))
    except UnidentifiedImageError as exc:
        raise DataError(f"is no image in one of the formats {', '.join(FORMATS)}; convert it or leave it out") from exc
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, OverflowError, MemoryError) as exc:
        if isinstance(exc, DataError):
            raise
        raise DataError(f"cannot be decoded ({first_line(exc)}); its file is damaged, so write it anew or leave it out") from exc


def _check_header(image: Image.Image, limits: ImageLimits) -> None:
    width, height = image.size
    if width * height > limits.max_pixels:
        raise DataError(f"has {width} x {height} pixels, allowed are {limits.told('max_image_pixels')}")
    if max(width, height) > MAX_SIDE:
        raise DataError(f"is {width} x {height} pixels large, allowed are {MAX_SIDE} along a side; shrink it or cut it")
    if not (width and height):
        raise DataError(f"is {width} x {height} pixels large; leave it out")
    if (frames := getattr(image, "n_frames", 1)) > 1:
        raise DataError(f"is animated or has several pages ({frames} of them); give the one that is meant as an image of its own")


def _in_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _WIDE:
        values = np.asarray(image).astype(np.int64)
        if values.min(initial=0) < 0 or values.max(initial=0) > _MOST_16_BITS:
            raise DataError(f"has grey values from {values.min()} to {values.max()}, allowed are 0 to {_MOST_16_BITS}; scale it")
        return Image.fromarray(((values + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise DataError("has pixels of floating point, whose range is unknown; write it with 8 or 16 bits")
    if "A" in image.mode or "transparency" in image.info:
        upper = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", upper.size, "white"), upper).convert("RGB")
    return image.convert("RGB")
