"""Attention over packed rows, registered in transformers under the name "packed"; importing this module registers it.

`build_plan` turns the segments of a PackedRow into index tensors once per row; every layer then computes segments of like length together,
one scaled_dot_product_attention call per bucket, and no token ever sees another sequence. The plan reaches the layers as the keyword
`attention_plan` of the model's forward. Without a plan a row is one sequence, computed as transformers' own "sdpa" does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from offbeat.data.packing import PackedRow
from offbeat.errors import ModelError

PACKED = "packed"

_MAX_WASTE = 0.25
"""Largest share of padding in a bucket. More buckets cost a kernel launch per layer each; padding costs time on every token."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """n segments computed in one call, padded to Lq queries and Lk keys each.

    Attributes:
        n, num_queries, num_keys: n, Lq, Lk.
        mask: [n or 1, 1, Lq, Lk] bool, True where a query attends; None for plain causal attention, where Lq = Lk.
    """

    n: int
    num_queries: int
    num_keys: int
    mask: Tensor | None


@dataclass(eq=False)
class AttentionPlan:
    """How to compute attention over one row; the same for all layers.

    Attributes:
        buckets: cover the row's segments, shortest first.
        query_index: [sum of n * Lq] int64, row token of each bucket's queries, one bucket after another; None where that is the row itself.
        key_index: [sum of n * Lk] int64, the same for keys, a prefix before the segment's own; None where that is the row itself.
        restore: [R] int64, place of each row token among the queries; None with query_index.
        longest_span: most tokens that one token attends to.
        num_calls: layers that used the plan so far. A model that ignores it would mix sequences without a word, so callers check.
    """

    buckets: tuple[Bucket, ...]
    query_index: Tensor | None
    key_index: Tensor | None
    restore: Tensor | None
    longest_span: int
    num_calls: int = 0


def build_plan(row: PackedRow, device: torch.device | str = "cpu") -> AttentionPlan:
    """Group the segments of a row into buckets of like length.

    Args:
        row: R tokens in S segments; computed fastest when they stand in order of their lengths, as in `pack_row`'s families.
        device: where the index tensors go; the model's.

    Returns:
        A plan for forwards over this row only. Padding is at most a quarter of a bucket's queries, and of its keys. Segments of one length
        without prefixes need no copy of anything.
    """
    segments = row.segments
    order = np.lexsort((segments.prefix_lengths, segments.lengths, segments.prefix >= 0))
    buckets, queries, keys, real = [], [], [], []
    for low, high in _bucket_bounds(segments.lengths[order], segments.prefix_lengths[order]):
        chosen = order[low:high]
        starts, lengths, prefix = segments.starts[chosen], segments.lengths[chosen], segments.prefix[chosen]
        own = _padded_ranges(starts, lengths)
        queries.append(own)
        real.append(np.arange(own.shape[1]) < lengths[:, None])
        if prefix[0] < 0:
            # Padding stands right of the real tokens, where causal attention never looks.
            keys.append(own)
            mask = None
        else:
            prefix_lengths = segments.lengths[prefix]
            keys.append(np.concatenate([_padded_ranges(segments.starts[prefix], prefix_lengths), own], axis=1))
            mask = torch.from_numpy(_prefix_mask(prefix_lengths, own.shape[1])).to(device)
        buckets.append(Bucket(own.shape[0], own.shape[1], keys[-1].shape[1], mask))
    query_index = _joined(queries)
    place = np.flatnonzero(_joined(real))
    restore = np.empty(len(row), np.int64)
    restore[query_index[place]] = place
    moved = len(query_index) > len(row) or (order[1:] < order[:-1]).any()
    prefixed = bool((segments.prefix >= 0).any())
    return AttentionPlan(
        buckets=tuple(buckets),
        query_index=torch.from_numpy(query_index).to(device) if moved else None,
        key_index=torch.from_numpy(_joined(keys)).to(device) if moved or prefixed else None,
        restore=torch.from_numpy(restore).to(device) if moved else None,
        longest_span=segments.longest_span,
    )


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    attention_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, in the signature of transformers' AttentionInterface.

    Args:
        query: [1, H, R, D].
        key, value: [1, Hkv, R, D]; H is a multiple of Hkv.
        attention_mask: must be None when a plan is given.
        sliding_window: with a plan, accepted when no token attends further back than that.
        attention_plan: of this row; None computes each row of a batch as one causal sequence.

    Returns:
        [1, R, H, D] and None.

    Raises:
        ModelError: the layer needs a form of attention that packed rows do not have.
    """
    if attention_plan is None:
        if attention_mask is None and sliding_window is not None and query.shape[2] == key.shape[2]:
            attention_mask = _window_mask(query.shape[2], sliding_window, query.device)
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    _refuse_unsupported(query, attention_mask, sliding_window, attention_plan, kwargs)
    attention_plan.num_calls += 1
    # [R, heads, D]: in transformers' layers this is the order in memory.
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    queries = _gather(query, attention_plan.query_index).split([bucket.n * bucket.num_queries for bucket in attention_plan.buckets])
    keys, values = (
        _gather(x, attention_plan.key_index).split([bucket.n * bucket.num_keys for bucket in attention_plan.buckets]) for x in (key, value)
    )
    outputs = [
        _attend(bucket, *parts, dropout=dropout, scale=scaling)
        for bucket, *parts in zip(attention_plan.buckets, queries, keys, values, strict=True)
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _gather(output, attention_plan.restore).unsqueeze(0), None


def _refuse_unsupported(query: Tensor, mask: Tensor | None, window: int | None, plan: AttentionPlan, kwargs: dict[str, Any]) -> None:
    if query.shape[0] != 1 or mask is not None:
        raise ModelError(
            f"packed attention takes one row and no attention_mask, got {query.shape[0]} rows{'' if mask is None else ' and a mask'}; "
            "put all sequences in one row"
        )
    if window is not None and window < plan.longest_span:
        raise ModelError(
            f"this model attends over a sliding window of {window} tokens, but a sequence of {plan.longest_span} is longer; "
            "use shorter sequences or another model"
        )
    special = sorted(name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None)
    if special:
        raise ModelError(f"packed attention does not compute {', '.join(special)}, which this model's layers ask for; use another model")


def _attend(bucket: Bucket, query: Tensor, key: Tensor, value: Tensor, *, dropout: float, scale: float | None) -> Tensor:
    """[n * Lq, H, D] queries, [n * Lk, Hkv, D] keys and values to [n * Lq, H, D]."""
    q, k, v = (x.reshape(bucket.n, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    output = scaled_dot_product_attention(
        q, k, v, attn_mask=bucket.mask, dropout_p=dropout, is_causal=bucket.mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return output.transpose(1, 2).reshape(len(query), *output.shape[1::2])


def _gather(rows: Tensor, index: Tensor | None) -> Tensor:
    if index is None:
        return rows
    # As an embedding, because its backward adds whole rows at once; that of index_select is several times slower on a CPU.
    return embedding(index, rows.reshape(len(rows), -1)).view(len(index), *rows.shape[1:])


def _bucket_bounds(lengths: np.ndarray, prefix_lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """Neighbouring segments, all with a prefix or all without, that waste at most _MAX_WASTE of a bucket."""
    low, queries, keys = 0, _Padding(), _Padding()
    for i, (length, prefix_length) in enumerate(zip(lengths.tolist(), prefix_lengths.tolist(), strict=True)):
        mixed = i > low and (prefix_length > 0) != (prefix_lengths[low] > 0)
        fits = queries.fits(length) and keys.fits(length + prefix_length)
        if i > low and (mixed or not fits):
            yield low, i
            low, queries, keys = i, _Padding(), _Padding()
        queries.add(length)
        keys.add(length + prefix_length)
    if len(lengths):
        yield low, len(lengths)


class _Padding:
    """Running waste of padding lengths to their maximum."""

    def __init__(self) -> None:
        self.count, self.total, self.longest = 0, 0, 0

    def fits(self, length: int) -> bool:
        padded = (self.count + 1) * max(self.longest, length)
        return padded - self.total - length <= _MAX_WASTE * padded

    def add(self, length: int) -> None:
        self.count, self.total, self.longest = self.count + 1, self.total + length, max(self.longest, length)


def _prefix_mask(prefix_lengths: np.ndarray, num_queries: int) -> np.ndarray:
    """[n, 1, Lq, width + Lq] bool: all of the prefix, then causal; n is 1 where all prefixes are equally long."""
    width = int(prefix_lengths.max())
    in_prefix = np.arange(width) < prefix_lengths[:, None]
    if in_prefix.all():
        in_prefix = in_prefix[:1]
    mask = np.empty((len(in_prefix), 1, num_queries, width + num_queries), bool)
    mask[..., :width] = in_prefix[:, None, None]
    mask[..., width:] = np.tri(num_queries, dtype=bool)
    return mask


def _padded_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[n, longest] int64 row indices; padding repeats the last real one, whose extra copies get no gradient."""
    return starts[:, None] + np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([part.ravel() for part in parts])


def _window_mask(length: int, window: int, device: torch.device) -> Tensor | None:
    """[L, L] bool, each token over the last `window` ones; None where that is plain causal attention."""
    if length <= window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _packed_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """No mask for plain rows, so that a packed row never builds an [R, R] one; padded batches and caches get what "sdpa" gets."""
    if kwargs.get("attention_mask") is None and kwargs.get("q_length") == kwargs.get("kv_length"):
        return None
    return sdpa_mask(*args, **kwargs)


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _packed_mask)
