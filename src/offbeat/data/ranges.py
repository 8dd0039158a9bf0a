"""Ranges of an array back to back, such as the tokens of the sequences of a batch: range i is offsets[i]:offsets[i + 1]."""

from collections.abc import Sequence

import numpy as np


def gather_ranges(offsets: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return [K] int64, the positions in the ranges offsets[i]:offsets[i + 1] of the given i, one range after another.

    For example, [3, 4, 0, 1, 2] for the offsets [0, 3, 5] and the indices [1, 0].
    """
    lengths = np.diff(offsets)[indices]
    starts = np.cumsum(lengths) - lengths
    return np.repeat(offsets[indices] - starts, lengths) + np.arange(lengths.sum())


def take_ranges(values: np.ndarray, offsets: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return the [K] values at `gather_ranges(offsets, indices)`, copied as one piece for each run of consecutive indices."""
    return joined(values, run_pieces(offsets, indices, run_starts(indices)))


def over_ranges(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return [M], with M = offsets[-1]: each value [N] repeated over its range offsets[i]:offsets[i + 1].

    `np.repeat` gives the same, but holds the interpreter's lock throughout, so that an event loop stands still for as long.
    """
    spread = np.empty(offsets[-1], values.dtype)
    for value, start, end in zip(values.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        spread[start:end] = value
    return spread


def any_in_ranges(flags: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return [N] bool, whether one of the flags [M] bool is set in each of the ranges offsets[i]:offsets[i + 1], which cover all."""
    found, some = np.zeros(len(offsets) - 1, np.bool_), np.diff(offsets) > 0
    found[some] = np.logical_or.reduceat(flags, offsets[:-1][some])
    return found


def run_starts(indices: np.ndarray) -> np.ndarray:
    """Return the entries at which runs of consecutive indices [K] begin, such as [0, 2] for [4, 5, 1]."""
    return np.flatnonzero(np.diff(indices, prepend=-2) != 1)


def run_pieces(offsets: np.ndarray, indices: np.ndarray, first: np.ndarray) -> list[slice]:
    """Return the positions of `gather_ranges`, one slice for each run of the [K] indices; runs begin at the entries `first`."""
    last = np.append(first, len(indices))[1:] - 1
    return list(map(slice, offsets[indices[first]].tolist(), offsets[indices[last] + 1].tolist()))


def joined(values: np.ndarray, pieces: Sequence[slice]) -> np.ndarray:
    """Return [K], a copy of these pieces of `values`, back to back."""
    return np.concatenate([values[:0], *(values[piece] for piece in pieces)])


def bounds(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return [N + 1] int64, the bounds of consecutive ranges of these lengths, such as [0, 3, 5] for [3, 2]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
