"""Pieces of prompts and datums become one sequence of tokens, or are refused with their place."""

import numpy as np
import pytest

from offbeat.service.errors import BadRequestError
from offbeat.service.wire.chunks import ImageChunk, ReadImage, check_count, image_chunk, images_in, join
from offbeat.service.wire.limits import WireLimits

LIMITS = WireLimits(vocab_size=100, context=16, max_images=2)
PNG, JPEG = b"\x89PNG\r\n\x1a\n...", b"\xff\xd8\xff..."
ID = 2**30 + 7


def image(name: str = "prompt.chunks[0]", data: bytes = PNG, kind: str = "png", *, limits: WireLimits = LIMITS, resized: bool = False) -> (
        ImageChunk):
    return image_chunk(name, data, kind, 5, limits=limits, resized=resized)


def test_an_image_stands_in_its_place() -> None:
    one, again, other = (image() for _ in range(3))
    same = ReadImage(np.array([9, ID, ID], np.int32), 8)
    images = {one: same, again: same, other: ReadImage(np.array([ID + 1], np.int32), 4)}
    joined = join("prompt", [np.array([1, 2]), one, np.array([3]), other, again], images, limits=LIMITS)
    assert joined.tokens.tolist() == [1, 2, 9, ID, ID, 3, ID + 1, 9, ID, ID] and joined.tokens.dtype == np.int32
    assert joined.of_image.tolist() == [False, False, True, True, True, False, True, True, True, True]
    assert joined.num_patches == 12, "an image that comes again is computed once"


def test_text_alone_is_what_it_is() -> None:
    joined = join("prompt", [np.array([1, 2]), np.array([3])], {}, limits=LIMITS)
    assert joined.tokens.tolist() == [1, 2, 3] and not joined.of_image.any() and joined.num_patches == 0


def test_both_formats_are_known_by_how_their_files_begin() -> None:
    assert image(data=PNG).expected_tokens == 5
    assert image(data=JPEG, kind="jpeg").data == JPEG
    assert image_chunk("a", memoryview(PNG), "png", None, limits=LIMITS, resized=False).data == PNG


@pytest.mark.parametrize(("fields", "says"), [
    ({"limits": WireLimits(vocab_size=100, context=16)}, "prompt.chunks[0] is an image, and this model reads text alone here"),
    ({"kind": "webp"}, "prompt.chunks[0].format must be png or jpeg, got 'webp'"),
    ({"kind": ""}, "prompt.chunks[0].format must be png or jpeg, got ''"),
    ({"kind": "jpeg"}, "prompt.chunks[0] says that its format is jpeg, and its data is no such file"),
    ({"data": b""}, "prompt.chunks[0] says that its format is png, and its data is no such file"),
    ({"resized": True}, "prompt.chunks[0] asks for other dimensions, and only the model's own processor resizes images")])
def test_what_can_be_seen_before_an_image_is_read_is_refused_then(fields: dict, says: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        image(**fields)
    assert str(caught.value).startswith(says)


def test_images_are_counted() -> None:
    pieces = [image(), np.array([1]), image(), image()]
    assert images_in(pieces) == (pieces[0], pieces[2], pieces[3])
    check_count("prompt", pieces[:3], LIMITS)
    with pytest.raises(BadRequestError, match="prompt has 3 images, allowed are 2 here; leave some out"):
        check_count("prompt", pieces, LIMITS)


@pytest.mark.parametrize(("text", "says"), [
    ([], "prompt must have 1 to 16 tokens, got 0"), ([1] * 14, "prompt must have 1 to 16 tokens, got 17"),
    ([100], "prompt must hold token ids of 0 to 99, got 100"), ([ID], f"prompt must hold token ids of 0 to 99, got {ID}")])
def test_text_is_checked_and_cannot_spell_an_image_out(text: list[int], says: str) -> None:
    chunk = image()
    pieces = [np.array(text, np.int64), *([chunk] if text else [])]
    with pytest.raises(BadRequestError) as caught:
        join("prompt", pieces, {chunk: ReadImage(np.array([ID] * 3, np.int32), 8)}, limits=LIMITS)
    assert str(caught.value) == says
