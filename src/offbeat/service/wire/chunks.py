"""Pieces of prompts and datums: text, and images before and after they are read. Used by `sample_body`, `training` and `app`.

A client sends the bytes of an image's file. `app.request_images` reads them, and `join` puts the tokens of each image in its place, so
that a request holds tokens alone. Tokens of text are checked before: only here do ids of images come into a request.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from offbeat.service.errors import BadRequestError
from offbeat.service.wire.limits import WireLimits

_BEGINNINGS = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}
"""Formats of the protocol, with the bytes that their files begin with."""


@dataclass(frozen=True, eq=False)
class ImageChunk:
    """An image that has not been read.

    Attributes:
        name: place in the request, such as "prompt.chunks[1]".
        data: the bytes of its file.
        expected_tokens: the number of its tokens, as its client has counted; None if it has not.
    """

    name: str
    data: bytes | memoryview
    expected_tokens: int | None = None


@dataclass(frozen=True, eq=False)
class ReadImage:
    """A stored image: `tokens` [P] int32 stand for it in a sequence, and the model's tower computes `num_patches` patches."""

    tokens: np.ndarray
    num_patches: int


Piece = np.ndarray | ImageChunk
"""Tokens of a text, [L] integers, or an image."""

ReadImages = Mapping[ImageChunk, ReadImage]
NO_IMAGES: ReadImages = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Joined:
    """A sequence of tokens.

    Attributes:
        tokens: [N] int32.
        of_image: [N] bool, which of them stand for an image.
        num_patches: of all its images; one that occurs again counts once, because it is computed once.
    """

    tokens: np.ndarray
    of_image: np.ndarray
    num_patches: int


def image_chunk(
    name: str, data: bytes | memoryview, kind: str, expected_tokens: int | None, *, limits: WireLimits, resized: bool,
) -> ImageChunk:
    """Check what can be seen of an image before it is read.

    Args:
        kind: the format that the client names.
        resized: whether the client asks for other dimensions.

    Raises:
        BadRequestError: the model reads no images, the format is unknown or another one, or the dimensions are to be changed.
    """
    if not limits.max_images:
        raise BadRequestError(f"{name} is an image, and this model reads text alone here; send encoded_text")
    if kind not in _BEGINNINGS:
        raise BadRequestError(f"{name}.format must be {' or '.join(_BEGINNINGS)}, got {kind[:40]!r}; convert the image")
    if not bytes(data[:8]).startswith(_BEGINNINGS[kind]):
        raise BadRequestError(f"{name} says that its format is {kind}, and its data is no such file; name its format, or convert it")
    if resized:
        raise BadRequestError(
            f"{name} asks for other dimensions, and only the model's own processor resizes images; leave override_dimensions out, or send"
            " a smaller image")
    return ImageChunk(name, data, expected_tokens)


def check_count(name: str, pieces: Iterable[Piece], limits: WireLimits) -> None:
    """Raise BadRequestError if a prompt or a datum has more images than are allowed."""
    if (count := len(images_in(pieces))) > limits.max_images:
        raise BadRequestError(f"{name} has {count} images, allowed are {limits.max_images} here; leave some out")


def images_in(pieces: Iterable[Piece]) -> tuple[ImageChunk, ...]:
    """Return the images among pieces."""
    return tuple(piece for piece in pieces if isinstance(piece, ImageChunk))


def join(name: str, pieces: Sequence[Piece], images: ReadImages, *, limits: WireLimits) -> Joined:
    """Check the text of a sequence, and put the tokens of images in their places.

    Raises:
        BadRequestError: a token of text is outside the vocabulary, or there are no tokens or more than the context.
    """
    found = {piece: images[piece] for piece in images_in(pieces)}
    tokens = [found[piece].tokens if isinstance(piece, ImageChunk) else piece for piece in pieces]
    limits.check_length(name, sum(map(len, tokens)))
    for piece in pieces:
        if not isinstance(piece, ImageChunk):
            limits.check_ids(name, piece)
    of_image = np.repeat([isinstance(piece, ImageChunk) for piece in pieces], [len(each) for each in tokens])
    return Joined(np.concatenate(tokens).astype(np.int32, copy=False), of_image, count_patches(found.values()))


def count_patches(images: Iterable[ReadImage]) -> int:
    """Return the patches of images, of one that occurs again once."""
    return sum({image.tokens.tobytes(): image.num_patches for image in images}.values())
