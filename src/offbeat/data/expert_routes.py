"""Routes: the experts that each token of a sequence used in a mixture of experts. Numpy only.

An engine returns them with its samples, trajectories and batches carry them, and the trainer replays them (`model.route_replay`). The
routes of L tokens are an array [L, K] with K = layers with experts times experts per token, layer by layer. For example, two tokens in
two layers with two experts per token each:

    [[3, 0, 7, 2], [255, 255, 255, 255]]      the second token is not known to have been computed

An id takes one byte where a layer has up to 255 experts, and two where it has more. The type's largest number stands for an unknown route.
"""

import io
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zstandard

from offbeat.errors import DataError

ROUTE_DTYPES = (np.dtype(np.uint8), np.dtype(np.int16))
"""Types of the ids, the smaller one first."""

_NPY = b"\x93NUMPY"


class _Packed(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, int]
    data: bytes


def route_dtype(num_experts: int) -> np.dtype:
    """Return the type of ids in layers with up to `num_experts` experts; raises DataError if two bytes cannot tell so many apart."""
    for dtype in ROUTE_DTYPES:
        if num_experts <= unknown_id(dtype):
            return dtype
    raise DataError(f"routes tell at most {unknown_id(ROUTE_DTYPES[-1])} experts apart, got a layer with {num_experts}")


def unknown_id(dtype: np.dtype) -> int:
    """Return the id that stands for an unknown route, such as 255."""
    return int(np.iinfo(dtype).max)


def unknown_routes(length: int, like: np.ndarray) -> np.ndarray:
    """Return the unknown routes [L, K] of `length` tokens, of the type and width of `like` [any, K]."""
    return np.full((length, like.shape[1]), unknown_id(like.dtype), like.dtype)


def check_routes(routes: Any, tokens: np.ndarray) -> np.ndarray:
    """Return a read-only copy of the routes [L, K] of tokens [L]; raises DataError, the end of a sentence, if they are none."""
    given, length = np.asarray(routes), len(tokens)
    if given.ndim != 2 or len(given) != length:
        raise DataError(f"must have shape ({length}, K), got {given.shape}")
    if given.dtype not in ROUTE_DTYPES:
        raise DataError(f"must hold uint8 or int16, got {given.dtype.name}")
    copy = given.copy()
    copy.setflags(write=False)
    return copy


def join_routes(parts: Sequence[np.ndarray | None], lengths: Sequence[int]) -> np.ndarray | None:
    """Return the routes [sum of lengths, K] of sequences back to back; None where none of them has any.

    The routes of a part, [L, K] each, are unknown where it has none. Raises DataError if parts differ in K, being of different models.
    """
    known = [part for part in parts if part is not None and part.shape[1]]
    if not known:
        return None
    if len(widths := {part.shape[1] for part in known}) > 1:
        raise DataError(f"the routes of a batch must be of one model, got {' and '.join(map(str, sorted(widths)))} ids per token")
    wide = max((part.dtype for part in known), key=ROUTE_DTYPES.index)
    return np.concatenate([
        np.full((length, known[0].shape[1]), unknown_id(wide), wide) if part is None or not part.shape[1] else _widened(part, wide)
        for part, length in zip(parts, lengths, strict=True)])


def _widened(routes: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return routes [L, K] in a type that is at least as wide."""
    if routes.dtype == dtype:
        return routes
    return np.where(routes == unknown_id(routes.dtype), unknown_id(dtype), routes).astype(dtype)


def pack_routes(routes: np.ndarray) -> bytes:
    """Return routes [L, K] as bytes, compressed."""
    plain = msgspec.msgpack.encode(_Packed(routes.dtype.name, routes.shape, np.ascontiguousarray(routes).tobytes()))  # pyright: ignore
    return zstandard.ZstdCompressor(level=1).compress(plain)


def unpack_routes(packed: bytes) -> np.ndarray:
    """Return the routes [L, K] of bytes from `pack_routes`, or of vLLM's [L, layers, k] as a numpy file; raises DataError for others."""
    if packed.startswith(_NPY):
        return _read_npy(packed)
    try:
        told = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(packed), type=_Packed)
        dtype = np.dtype(told.dtype)
        routes = np.frombuffer(told.data, dtype).reshape(told.shape)
    except (zstandard.ZstdError, msgspec.DecodeError, TypeError, ValueError) as exc:
        raise DataError(f"these bytes are not routes: {exc}") from exc
    if dtype not in ROUTE_DTYPES:
        raise DataError(f"these bytes are not routes: they hold {told.dtype}")
    return routes


def _read_npy(data: bytes) -> np.ndarray:
    """Return the routes [L, K] of an array [L, layers, k] of whole numbers in numpy's file format."""
    try:
        given = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, OSError, EOFError) as exc:
        raise DataError(f"these bytes are not routes: {exc}") from exc
    if given.ndim != 3 or given.dtype.kind not in "iu":
        raise DataError(f"these bytes are not routes: they hold {given.dtype.name} in {given.ndim} dimensions instead of integers in 3")
    most = int(given.max(initial=0))
    if given.min(initial=0) < 0 or most >= unknown_id(ROUTE_DTYPES[-1]):
        raise DataError(f"these bytes are not routes: they name expert {most if most > 0 else given.min()}")
    # An id that is no expert's stands for an unknown route here, so that 256 experts need two bytes.
    return given.reshape(len(given), -1).astype(route_dtype(most + 1))
