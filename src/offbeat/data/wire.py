"""Converts frozen dataclasses, including numpy arrays, to bytes and back. Messages between processes use it; nothing is unpickled.

The format is MessagePack through msgspec, which checks types while decoding. An array travels as (dtype, shape, raw little-endian bytes),
e.g. ("float32", [2], 8 bytes).
`encode_pieces` gives the same bytes without copying large arrays, which would hold up an event loop even from another thread.
"""

import os
import struct
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any, TypeVar

import msgspec
import numpy as np

from offbeat.errors import DataError

T = TypeVar("T")

_ALLOWED_DTYPES = frozenset({"bool", "uint8", "uint16", "int16", "int32", "int64", "float32", "float64"})

_APART_BYTES = 1 << 16
"""Arrays of this size or larger are pieces of their own."""

_BIN32 = struct.Struct("!BI")
_MOST_BYTES = 2**32


class _Array(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _Array(value.dtype.name, value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} does not cross a process")


def _from_plain(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise NotImplementedError(f"{kind} does not cross a process")
    array = msgspec.convert(value, _Array)
    if array.dtype not in _ALLOWED_DTYPES:
        raise ValueError(f"array dtype must be one of {sorted(_ALLOWED_DTYPES)}, got {array.dtype!r}")
    return np.frombuffer(array.data, dtype=array.dtype).reshape(array.shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)


def encode(value: Any) -> bytes:
    """Encode a frozen dataclass, or a builtin container of them."""
    return _encoder.encode(value)


def encode_pieces(value: Any) -> Sequence[bytes | memoryview]:
    """Encode as `encode` does, as pieces that make up its bytes; large arrays are pieces that share their memory."""
    mark, arrays = os.urandom(16), []

    def to_plain(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or not _APART_BYTES <= value.nbytes < _MOST_BYTES:
            return _to_plain(value)
        arrays.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        # The header of the array's bytes stands in the message, followed by a mark where the bytes themselves belong.
        return value.dtype.name, value.shape, msgspec.Raw(_BIN32.pack(0xC6, value.nbytes) + mark)

    frame = msgspec.msgpack.encode(value, enc_hook=to_plain).split(mark)
    return [piece for piece in chain.from_iterable(zip_longest(frame, arrays, fillvalue=b"")) if len(piece)]


def decode(kind: type[T], data: bytes | memoryview) -> T:
    """Decode bytes from `encode`; arrays are read-only views of `data`. Raises DataError if the bytes do not describe a `kind`."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_from_plain)
    except (msgspec.DecodeError, ValueError) as exc:
        raise DataError(f"these bytes are not a {getattr(kind, '__name__', kind)}: {exc}") from exc


def encode_json(value: Any) -> bytes:
    """Encode a value as one line of JSON; arrays become lists."""
    return msgspec.json.encode(value, enc_hook=lambda v: v.tolist() if isinstance(v, np.ndarray | np.generic) else _to_plain(v))


def decode_json(kind: type[T], data: bytes | str) -> T:
    """Decode bytes from `encode_json`, which lack dtypes: `__post_init__` sets them. Raises DataError if the text describes no `kind`."""
    try:
        return msgspec.json.decode(data, type=kind, dec_hook=lambda _, v: np.asarray(v))
    except (msgspec.DecodeError, ValueError) as exc:
        raise DataError(f"this JSON is not a {getattr(kind, '__name__', kind)}: {exc}") from exc
