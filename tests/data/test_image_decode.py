"""Twenty kinds of files that go wrong elsewhere: each is one sentence, or the right pixels."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from image_models import file_of, picture
from offbeat.data.image_decode import decode_image
from offbeat.data.image_sources import ImageLimits
from offbeat.errors import DataError

LIMITS = ImageLimits(max_bytes=200_000, max_pixels=100_000)
PIXELS = np.asarray(picture())


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, data=b""):
    """A PNG that says that it has this size."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def turned(orientation):
    exif = Image.Exif()
    exif[274] = orientation
    return file_of(picture(), exif=exif)


def animated(kind):
    file = io.BytesIO()
    picture(0).save(file, format=kind, save_all=True, append_images=[picture(1)])
    return file.getvalue()


BAD = {
    "no image": (b"hello, world", "is no image"),
    "empty": (b"", "is no image"),
    "a vector drawing": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no image"),
    "truncated PNG": (file_of(picture())[:900], "cannot be decoded"),
    "truncated JPEG": (file_of(picture(), "JPEG")[:500], "cannot be decoded"),
    "damaged PNG": (file_of(picture())[:200] + b"\0" * 50 + file_of(picture())[250:], "cannot be decoded"),
    "only a header": (file_of(picture())[:20], "is no image|cannot be decoded"),
    "20,000 pixels wide": (png(20_000, 4), "allowed are 16384 along a side"),
    "decompression bomb": (png(50_000, 50_000), "allowed are data.max_image_pixels = 100000"),
    "too many pixels": (file_of(Image.new("RGB", (400, 300))), "allowed are data.max_image_pixels = 100000"),
    "too many bytes": (file_of(picture()) + b"\0" * 200_000, "allowed are data.max_image_bytes = 200000"),
    "fewer pixels than it says": (png(40, 28, b"\0" * 100), "cannot be decoded"),
    "animated GIF": (animated("GIF"), "is animated"),
    "animated PNG": (animated("PNG"), "is animated"),
    "pages": (animated("TIFF"), "several pages"),
    "floating point": (file_of(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"), "floating point"),
    "32 bits": (file_of(Image.fromarray(np.full((4, 4), 1 << 20, np.int32)), "TIFF"), "grey values"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_sentence(name):
    data, said = BAD[name]
    with pytest.raises(DataError, match=said) as raised:
        decode_image(data, LIMITS)
    assert "\n" not in str(raised.value)


def grey(image):
    return np.asarray(image.convert("L").convert("RGB"))


DEEP = (np.asarray(picture().convert("L")).astype(np.uint16) * 257)
RIGHT = {
    "as it is": (file_of(picture()), PIXELS),
    "BMP": (file_of(picture(), "BMP"), PIXELS),
    "lossless WebP": (file_of(picture(), "WEBP", lossless=True), PIXELS),
    "grey": (file_of(picture(mode="L")), grey(picture())),
    "one bit": (file_of(picture(mode="1")), np.asarray(picture(mode="1").convert("RGB"))),
    "16 bits": (file_of(Image.fromarray(DEEP)), grey(picture())),
    "CMYK": (file_of(picture(mode="CMYK"), "TIFF"), PIXELS),
    "palette": (file_of(picture().quantize(16)), np.asarray(picture().quantize(16).convert("RGB"))),
    "turned by EXIF": (turned(6), np.rot90(PIXELS, -1)),
    "mirrored by EXIF": (turned(2), PIXELS[:, ::-1]),
    "opaque": (file_of(picture(mode="RGBA")), PIXELS),
    "transparent": (file_of(Image.new("RGBA", (4, 4), (10, 20, 30, 0))), np.full((4, 4, 3), 255, np.uint8)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_other_files_have_the_right_pixels(name):
    data, expected = RIGHT[name]
    assert np.array_equal(np.asarray(decode_image(data, LIMITS)), expected)
