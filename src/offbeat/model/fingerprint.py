"""A short hash of the exact contents of a model's weights, equal on the trainer and on an engine that holds the same bytes.

Called on both sides of a publish: with it the engine proves that it serves the version it was told to serve. Torch-free.
"""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

_WHOLE_BYTES = 1 << 20
_PAGE_BYTES = 4096
_NUM_PAGES = 64


def fingerprint(items: Iterable[tuple[str, np.ndarray]]) -> str:
    """Hash named weights, (name, [B] uint8) of each tensor in any order, to 32 hexadecimal digits.

    Tensors above 1 MiB are sampled: 64 evenly spaced pages of 4 KiB, the first and the last page among them. An optimizer step changes
    nearly every page, so a sample tells versions apart; it is no proof against tampering.

    Raises:
        ValueError: an array is not one-dimensional uint8, or a name occurs twice.
    """
    return combine(digests(items))


def digests(items: Iterable[tuple[str, np.ndarray]]) -> dict[str, bytes]:
    """Hash each weight, [B] uint8, by itself, as the first half of `fingerprint`, with its arguments and errors; 32 bytes by name."""
    found: dict[str, bytes] = {}
    for name, data in items:
        if data.dtype != np.uint8 or data.ndim != 1:
            raise ValueError(f"fingerprint takes one-dimensional uint8 arrays, got {data.dtype} of shape {data.shape} for {name!r}")
        if name in found:
            raise ValueError(f"fingerprint got {name!r} twice")
        found[name] = _digest(name, data)
    return found


def combine(digests: Mapping[str, bytes]) -> str:
    """Return the fingerprint of all weights from their digests, which any ranks may have computed."""
    return hashlib.blake2b(b"".join(digests[name] for name in sorted(digests)), digest_size=16).hexdigest()


def _digest(name: str, data: np.ndarray) -> bytes:
    # The name is preceded by its length, so that no two different (name, size, bytes) give the same input.
    encoded = name.encode()
    state = hashlib.blake2b(b"%d:%s:%d:" % (len(encoded), encoded, len(data)), digest_size=32)
    if len(data) <= _WHOLE_BYTES:
        state.update(np.ascontiguousarray(data).data)
    else:
        for start in np.linspace(0, len(data) - _PAGE_BYTES, _NUM_PAGES).astype(np.int64):
            state.update(np.ascontiguousarray(data[start : start + _PAGE_BYTES]).data)
    return state.digest()
