"""Request bodies that clients compressed, unpacked within bounds. Used by `app`."""

import zstandard

from offbeat.service.errors import BadRequestError, TooLargeError


def unpack(data: bytes, *, max_bytes: int) -> bytes:
    """One zstd frame as it was; never more than `max_bytes` are held.

    Raises:
        TooLargeError: it says that it is larger.
        BadRequestError: it is damaged, or turns out larger.
    """
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if max_bytes < size < zstandard.CONTENTSIZE_ERROR:
            raise TooLargeError(f"the body unpacks to {size} bytes; at most {max_bytes} are taken, so send less at once")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=max_bytes, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise BadRequestError(f"the body does not unpack with zstd to at most {max_bytes} bytes: {exc}") from exc
