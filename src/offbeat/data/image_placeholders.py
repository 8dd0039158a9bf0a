"""Placeholders of images: parts of messages for chat templates, and token ids with their labels. Called by `data.tokenizer`; torch-free."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from offbeat.data.forms import Messages
from offbeat.data.image_sources import MARK
from offbeat.data.image_store import FIRST_ID, ImageStore
from offbeat.errors import DataError


def with_parts(messages: Messages) -> list[dict[str, Any]]:
    """Return messages in which each mark of an image in a text has become a part.

    For example, the content "<mark>how many?" becomes [{"type": "image"}, {"type": "text", "text": "how many?"}].
    """
    return [{**message, "content": _parts_of(message["content"])} if "content" in message else dict(message) for message in messages]


def split_images(ids: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield token ids in runs, each with the id of the image that it is, or 0 for text.

    For example, (0, [5, 6]), (2**30, [2**30, 2**30]) and (0, [7]) for text, an image of two tokens, and text.
    """
    for image_id, run in groupby(ids, key=lambda index: index if index >= FIRST_ID else 0):
        yield image_id, list(run)


def label_of(image_id: int, store: ImageStore | None) -> str:
    """Return the text that shows an image to people, such as "<image 640x480 3f2a9c01>"; without its size where it is not stored."""
    if store is not None:
        with suppress(DataError):
            return store.get(image_id).label
    return f"<image {image_id}>"


def _parts_of(content: Any) -> Any:
    """Return the content of a message with its images as parts, if its text has marks of images."""
    if isinstance(content, str):
        return _parts_of([{"type": "text", "text": content}]) if MARK in content else content
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        texts = str(part["text"]).split(MARK) if isinstance(part, Mapping) and "text" in part else []
        if len(texts) < 2:
            parts.append(part)
            continue
        for number, text in enumerate(texts):
            parts += [{"type": "image"}] if number else []
            parts += [{**part, "text": text}] if text else []
    return parts
