"""Images of a row as data formats write them: where each one is, not its pixels. Called by `data.row`; needs no image library.

A message's text holds `MARK` where an image stands, and the row holds the images in the order of their marks. Nothing is fetched: addresses
of the web are refused.
"""

import ast
import base64
import binascii
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from offbeat.errors import DataError, shorten

MARK = "\ufffc"
"""Unicode's object replacement character: stands in a text where an image is."""

WRITTEN_MARK = "<image>"
"""How a prompt of text writes the place of an image of its row's column."""

COLUMNS = ("images", "image")
"""Columns of a row's images; the second one is read if it holds what can only be an image."""

PART_KINDS = ("image", "image_url", "input_image")
"""Types of a message's parts that are images: Hugging Face's and Anthropic's, OpenAI's, and OpenAI's of its newer API."""

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_DATA_URI = re.compile(r"data:(?P<kind>[\w.+/*-]*)(?P<options>(?:;[\w.+=-]+)*),(?P<data>.*)", re.DOTALL)
_ADDRESS = re.compile(r"(?!file:)[a-zA-Z][\w+.-]+://")
_NAMED_FILE = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")


@dataclass(frozen=True)
class ImageLimits:
    """Bounds of the images of a row.

    Attributes:
        max_bytes: of an image's file.
        max_pixels: of an image, width times height.
        max_images: of a row, or of a chat.
        in_data: whether they are settings of [data]; else they are the server's.
    """

    max_bytes: int = 20_000_000
    max_pixels: int = 16_777_216
    max_images: int = 16
    in_data: bool = field(default=True, repr=False)

    def told(self, name: str) -> str:
        """Return a bound with what to do, such as "data.max_images = 16; leave some out or raise it", by the name of its setting."""
        value, change = {
            "max_images": (self.max_images, "leave some out"), "max_image_bytes": (self.max_bytes, "shrink it"),
            "max_image_pixels": (self.max_pixels, "shrink it")}[name]
        return f"data.{name} = {value}; {change} or raise the bound" if self.in_data else f"{value} here; {change}"


@dataclass(frozen=True)
class ImageSource:
    """An image that has not been read: the path of its file, or else the file's bytes."""

    path: str = ""
    data: bytes = b""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of its file; of its path, if that cannot be read."""
        try:
            data = Path(self.path).read_bytes() if self.path else self.data
        except OSError:
            data = self.path.encode(errors="surrogatepass")
        return hashlib.sha256(data).hexdigest()

    def read(self, limits: ImageLimits | None = None) -> bytes:
        """Return the bytes of its file; raises DataError, the end of a sentence about it, if there is none, or one beyond `limits`."""
        try:
            size = Path(self.path).stat().st_size if self.path else len(self.data)
            if limits is not None and size > limits.max_bytes:
                raise DataError(f"has {size} bytes, allowed are {limits.told('max_image_bytes')}")
            return Path(self.path).read_bytes() if self.path else self.data
        except OSError as exc:
            raise DataError(f"cannot be read from {self.path!r} ({exc.strerror}); mend the path, relative to the data file") from exc


def image_of(value: Any, where: str) -> ImageSource:
    """Return the source of an image: a path, a data URI, bytes, or what `datasets` writes, {"bytes": ..., "path": ...}.

    Raises DataError if it is none of these, or an address of the web. `where` names the image, such as "'train.jsonl', line 3: image 1";
    paths are relative to the folder of that file.
    """
    if isinstance(value, bytes | bytearray | memoryview) and len(value):
        return ImageSource(data=bytes(value))
    if isinstance(value, Mapping):
        found = next((value[key] for key in ("bytes", "url", "path", "data") if value.get(key)), None)
        if found is not None and not isinstance(found, Mapping):
            return image_of(found, where)
    if isinstance(value, str) and value.startswith("data:"):
        return ImageSource(data=_of_data_uri(value, where))
    if isinstance(value, str) and _ADDRESS.match(value):
        raise DataError(f"{where} is the address {shorten(value)}, and nothing is fetched; give a file or a data URI")
    if isinstance(value, str) and value:
        return ImageSource(path=str(_folder_of(where) / Path(value.removeprefix("file://")).expanduser()))
    raise DataError(f"{where} must be a path, a data URI or the bytes of a file, got {shorten(value)}")


def image_of_part(part: Mapping[str, Any], where: str) -> ImageSource | None:
    """Return the image of a message's part of a kind in `PART_KINDS`; None for the next image of the row's column. Raises as `image_of`."""
    given = next((part[key] for key in ("image_url", "source", "image", "url", "path", "base64") if part.get(key)), None)
    if given is None:
        return None
    if part.get("base64") is given or (isinstance(given, Mapping) and given.get("type") == "base64"):
        text = given["data"] if isinstance(given, Mapping) and isinstance(given.get("data"), str) else given
        return ImageSource(data=_decoded(text, where))
    return image_of(given, where)


def images_of_column(record: Mapping[str, Any], where: str) -> tuple[str, tuple[ImageSource, ...]]:
    """Return the column of a record that holds images, and these; an empty name if there is none. Raises as `image_of`."""
    for name in COLUMNS:
        value = record.get(name)
        several = value if isinstance(value, list | tuple) else [value]
        if value is None or value in ("", []) or not (name == COLUMNS[0] or all(map(_is_image, several))):
            continue
        return name, tuple(image_of(each, f"{where}: image {number}") for number, each in enumerate(several, start=1))
    return "", ()


def place_images(
    texts: Sequence[str], found: Sequence[ImageSource | None], column: tuple[ImageSource, ...], where: str, *, first: int,
) -> tuple[list[str], tuple[ImageSource, ...]]:
    """Give each place of an image in texts its image; returns the texts with a mark for each image, and the images.

    Args:
        texts: the texts of a prompt, in order, with `MARK` for each of `found`.
        found: images of the marks; None for one of the column.
        column: images of the row's column, in order; they take the places of None or else of "<image>", or stand before text `first`.

    Raises:
        DataError: the numbers of places and of images differ.
    """
    if sum(text.count(MARK) for text in texts) != len(found):
        raise DataError(f"{where}: a text of a row with images has the character U+FFFC, which stands for an image; leave it out")
    open_places = sum(image is None for image in found)
    if open_places or not column:
        if open_places != len(column):
            raise _differ(where, open_places, len(column))
        rest = iter(column)
        return list(texts), tuple(next(rest) if image is None else image for image in found)
    written = sum(text.count(WRITTEN_MARK) for text in texts)
    if written and written != len(column):
        raise _differ(where, written, len(column))
    if found:
        raise DataError(f"{where} has images in its messages and {len(column)} in a column that no message has a place for; leave one out")
    if written:
        return [text.replace(WRITTEN_MARK, MARK) for text in texts], column
    return [MARK * len(column) + text if index == first else text for index, text in enumerate(texts)], column


def _differ(where: str, places: int, images: int) -> DataError:
    return DataError(f"{where} has {places} places for images and {images} images in its column; give each place one")


def _is_image(value: Any) -> bool:
    if isinstance(value, bytes | bytearray):
        return True
    if isinstance(value, Mapping):
        return bool(value.get("bytes") or value.get("path"))
    return isinstance(value, str) and (value.startswith("data:image/") or (value.lower().endswith(_SUFFIXES) and not _ADDRESS.match(value)))


def _folder_of(where: str) -> Path:
    """Return the folder of the file that a row's name begins with; the current one if it names none."""
    named = _NAMED_FILE.match(where)
    path = Path(ast.literal_eval(named[0])) if named else Path()
    return path.parent if path.is_file() else path if path.is_dir() else Path()


def _of_data_uri(text: str, where: str) -> bytes:
    match = _DATA_URI.fullmatch(text)
    if match is None:
        raise DataError(f"{where} is no data URI: {text[:40]!r}; write data:image/png;base64, and the bytes of the file in base64")
    if "base64" in match["options"].split(";"):
        return _decoded(match["data"], where)
    return unquote_to_bytes(match["data"])


def _decoded(text: Any, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as exc:
        raise DataError(f"{where} is not in base64: {shorten(text)}; encode the bytes of the file") from exc
