"""Packed rows of all kinds, and their attention by a loop over tokens."""

import numpy as np
import torch

from offbeat.data.packing import PackedRow, Segments


def make_row(lengths, prefix=None):
    lengths = np.asarray(lengths)
    segments = Segments(np.cumsum(lengths) - lengths, lengths, np.full(len(lengths), -1) if prefix is None else np.asarray(prefix))
    none = np.zeros(0, np.int64)
    return PackedRow(np.zeros(lengths.sum(), np.int32), np.zeros(lengths.sum(), np.int32), segments, none, none, none, none)


def slow_attention(query, key, value, segments, scale, *, window=None, softcap=None, sinks=None):
    """[1, H, R, D] by a loop over tokens, straight from the definitions of Segments and of what layers may ask for."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    output = torch.empty_like(query)
    for start, length, prefix in zip(segments.starts, segments.lengths, segments.prefix, strict=True):
        before = list(range(segments.starts[prefix], segments.starts[prefix] + segments.lengths[prefix])) if prefix >= 0 else []
        for token in range(start, start + length):
            seen = (before + list(range(start, token + 1)))[-(window or 99) :]
            scores = (query[:, :, token : token + 1] * key[:, :, seen]).sum(-1) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            total = scores.exp().sum(-1, keepdim=True) + (0 if sinks is None else sinks[:, None].exp())
            output[:, :, token] = ((scores.exp() / total)[..., None] * value[:, :, seen]).sum(2)
    return output.transpose(1, 2)


ROWS = {
    "one sequence": make_row([6]),
    "equal lengths": make_row([4, 4, 4]),
    "many lengths": make_row([1, 2, 3, 5, 8, 13, 14]),
    "equal groups": make_row([3, 3, 4, 4, 4, 4], [-1, -1, 0, 1, 0, 1]),
    "no order": make_row([5, 2, 5, 2, 9]),
    "families of groups": make_row([3, 2, 1, 3, 3, 2, 1], [-1, 0, 0, -1, -1, 4, 4]),
    "ragged groups": make_row([2, 3, 9, 1, 4, 5, 6], [-1, -1, -1, 0, 2, 1, 2]),
}
