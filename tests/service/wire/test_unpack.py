"""Compressed bodies come out as they went in, or not at all."""

import contextlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from offbeat.service.errors import BadRequestError, RequestError, TooLargeError
from offbeat.service.wire.unpack import unpack


@pytest.mark.parametrize("with_size", [True, False])
@pytest.mark.parametrize("data", [b"", b"abc", bytes(range(256)) * 1000])
def test_a_body_comes_out_as_it_went_in(data: bytes, with_size: bool) -> None:
    packed = zstandard.ZstdCompressor(write_content_size=with_size).compress(data)
    assert unpack(packed, max_bytes=max(len(data), 1)) == data


def test_a_small_body_that_unpacks_to_a_large_one_is_refused() -> None:
    packed = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    with pytest.raises(TooLargeError, match="unpacks to 16777216 bytes"):
        unpack(packed, max_bytes=1 << 20)
    with pytest.raises(BadRequestError, match="at most 1048576 bytes"):
        unpack(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 24)), max_bytes=1 << 20)


def test_damage_is_refused() -> None:
    packed = zstandard.ZstdCompressor().compress(b"some text " * 100)
    for damaged in (packed[:-1], packed + b"x", b"", b"text", packed[:3]):
        with pytest.raises(BadRequestError):
            unpack(damaged, max_bytes=1 << 20)


@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    for body in (data, b"\x28\xb5\x2f\xfd" + data):
        with contextlib.suppress(RequestError):
            assert len(unpack(body, max_bytes=1 << 16)) <= 1 << 16
