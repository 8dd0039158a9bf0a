"""Images in chats: parts and blocks of the dialects as sources, and rows as messages with images. Decodes none; the renderer does.

A message's content has U+FFFC (`MARK`) in the place of each image. Nothing is fetched, and of the disk no files are read but those of a
folder that the server names.
"""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat.chat.messages import Message
from offbeat.data.image_placeholders import with_parts
from offbeat.data.image_sources import MARK, ImageSource, image_of
from offbeat.data.row import Row, chat_of
from offbeat.errors import DataError, RefusedError, shorten

_ADDRESS = re.compile(r"(?!file:)[a-zA-Z][\w+.-]*://")
_DETAILS = (None, "auto", "high", "original")
"""Values of `detail` that ask for no smaller image."""


@dataclass(frozen=True)
class ImageRules:
    """The folder that paths of images may lead to; None refuses paths."""

    files: Path | None = None

    def source_of(self, address: object, where: str) -> ImageSource:
        """Return the image at a data URI, or at a path below `files`; raises RefusedError if it is neither."""
        if isinstance(address, str) and address.startswith("data:"):
            try:
                return image_of(address, where)
            except DataError as exc:
                raise RefusedError(str(exc)) from exc
        if isinstance(address, str) and _ADDRESS.match(address):
            raise RefusedError(f"{where} is the address {shorten(address)}, and nothing is fetched; send a data URI")
        if not isinstance(address, str) or not address or self.files is None:
            raise RefusedError(
                f"{where} must be a data URI, got {shorten(address)}; write data:image/png;base64, and the bytes of the file in base64")
        try:
            path = (self.files / address.removeprefix("file://")).resolve()
            is_in_it = path.is_relative_to(self.files.resolve()) and path.is_file()
        except (OSError, ValueError, RuntimeError):  # a name that is too long or has a zero byte, or links in a circle
            path, is_in_it = Path(), False
        if not is_in_it:
            raise RefusedError(f"{where} is {shorten(address)}, which is no file in the folder of images; send a data URI, or a path in it")
        return ImageSource(path=str(path))

    def source_of_base64(self, text: object, where: str) -> ImageSource:
        """Return the image of a file in base64; raises RefusedError if it is none."""
        try:
            return ImageSource(data=base64.b64decode(str(text), validate=True))
        except ValueError as exc:
            raise RefusedError(f"{where} is not in base64: {shorten(text)}; encode the bytes of the file") from exc


@dataclass(frozen=True)
class Shown:
    """The text of a message with the images whose places are marked in it."""

    text: str = ""
    images: tuple[ImageSource, ...] = ()


def join_parts(parts: Sequence[str | ImageSource], where: str) -> Shown:
    """Join texts and images of a message. Texts that follow each other are lines; an image stands between texts without line breaks.

    Raises RefusedError if a text beside images has the mark of an image itself.
    """
    images = tuple(part for part in parts if isinstance(part, ImageSource))
    if images and any(MARK in part for part in parts if isinstance(part, str)):
        raise RefusedError(f"{where} has images and a text with the character U+FFFC, which stands for an image; leave it out")
    text = ""
    for at, part in enumerate(parts):
        text += MARK if isinstance(part, ImageSource) else f"\n{part}" if at and isinstance(parts[at - 1], str) else part
    return Shown(text, images)


def check_detail(detail: object, where: str) -> None:
    """Refuse a wish for a smaller image."""
    if detail not in _DETAILS:
        raise RefusedError(
            f"{where} has the detail {shorten(detail)}, and only the model's own processor resizes images; leave it out, or send a smaller"
            " image")


def messages_of(row: Row) -> list[Message]:
    """Return the prompt of a row of text and images as messages of roles and contents."""
    messages, rest = [], list(row.images)
    for each in chat_of(row.prompt):
        count = str(each["content"]).count(MARK) if row.images else 0
        messages.append(Message(each["role"], each["content"], images=tuple(rest[:count])))
        rest = rest[count:]
    return messages


def messages_to_send(row: Row) -> list[dict[str, Any]]:
    """Return the prompt of a row as messages for chat completions, with its images as data URIs; raises DataError if one cannot be read."""
    given, images = chat_of(row.prompt), iter(row.images)

    def sent(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] != "image":
            return part
        return {"type": "image_url", "image_url": {"url": data_uri(next(images))}}

    messages = with_parts(given) if row.images else [dict(message) for message in given]
    return [
        {**message, "content": [sent(part) for part in message["content"]]} if isinstance(message["content"], list) else message
        for message in messages]


def data_uri(image: ImageSource) -> str:
    """Return the file of an image as a data URI; raises DataError if it cannot be read."""
    data = image.read()
    kind = "jpeg" if data.startswith(b"\xff\xd8") else "webp" if data[8:12] == b"WEBP" else "gif" if data.startswith(b"GIF8") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def without_images(message: Message, text: str = "[image]") -> Message:
    """Return a message with a text in the places of its images."""
    return replace(message, content=message.content.replace(MARK, text), images=()) if message.images else message
