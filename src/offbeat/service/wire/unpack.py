"""Decompresses request bodies within bounds. Used by `app`."""

import zstandard

from offbeat.service.errors import BadRequestError, TooLargeError


def unpacked_size(data: bytes, *, max_bytes: int) -> int:
    """Return the most bytes that `unpack` will hold: the size in the frame, or `max_bytes` if there is none; raises as `unpack` does."""
    try:
        size = zstandard.get_frame_parameters(data).content_size
    except zstandard.ZstdError as exc:
        raise _damaged(max_bytes, exc) from exc
    if max_bytes < size < zstandard.CONTENTSIZE_ERROR:
        raise TooLargeError(f"the body unpacks to {size} bytes; at most {max_bytes} are taken, so send less at once")
    return min(size, max_bytes)


def unpack(data: bytes, *, max_bytes: int) -> bytes:
    """Decompress one zstd frame; never more than `max_bytes` are held.

    Raises TooLargeError if the frame says that it is larger, BadRequestError if it is damaged, or turns out larger.
    """
    unpacked_size(data, max_bytes=max_bytes)
    try:
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=max_bytes, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise _damaged(max_bytes, exc) from exc


def _damaged(max_bytes: int, exc: Exception) -> BadRequestError:
    return BadRequestError(f"the body does not unpack with zstd to at most {max_bytes} bytes: {exc}")
