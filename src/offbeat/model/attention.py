"""Attention over packed rows, registered in transformers under the name "packed"; importing this module registers it.

`build_plan` turns the segments of a PackedRow into index tensors once per row; every layer then computes segments of similar length
together, one scaled_dot_product_attention call per bucket, and no token ever sees another sequence. The plan reaches the layers as the
keyword `attention_plan` of the model's forward. Without a plan a row is one sequence, computed as transformers' own "sdpa" does. Torch's
function supports neither capped scores nor sinks: `explicit_attention` computes those. On a GPU in half precision `varlen_attention`
computes the whole row at once instead. Where a row is spread over ranks, each computes the whole plan under its share of the heads
(`offbeat.model.context`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from offbeat.data.packing import PackedRow
from offbeat.errors import ModelError
from offbeat.model.context import ContextGroup
from offbeat.model.route_replay import set_routes
from offbeat.model.uploads import upload
from offbeat.model.varlen import VarlenPlan, serves, varlen_attention

PACKED = "packed"

ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers, as in the configuration's `layer_types`, that packed rows support; other kinds mix the sequences of a row."""

_MAX_WASTE = 0.25
"""Largest share of padding in a bucket. More buckets cost one kernel launch per layer each; padding costs time on every token."""


@dataclass(frozen=True, eq=False)
class Bucket:
    """n segments computed in one call, padded to Lq queries and Lk keys each.

    Attributes:
        n, num_queries, num_keys: n, Lq, Lk.
        prefix_lengths: [n] int64, number of prefix tokens before each segment.
        seen: [n, Lq] int64, the last position in its own sequence to which each query attends; None where that is its own.
    """

    n: int
    num_queries: int
    num_keys: int
    prefix_lengths: np.ndarray
    seen: np.ndarray | None = None

    @cached_property
    def mask(self) -> Tensor | None:
        """[N or 1, 1, Lq, Lk] bool, on the CPU, True where a query attends; None for plain causal attention, where Lq = Lk."""
        if not self.prefix_lengths[0] and self.seen is None:
            return None
        return torch.from_numpy(_prefix_mask(self.prefix_lengths, self.num_queries, seen=self.seen))

    def window_mask(self, window: int) -> Tensor | None:
        """Return the mask [N or 1, 1, Lq, Lk] bool for a sliding window, on the CPU; None for plain causal attention."""
        if window < self.num_keys:
            return torch.from_numpy(_prefix_mask(self.prefix_lengths, self.num_queries, window, seen=self.seen))
        return self.mask


@dataclass(eq=False)
class AttentionPlan:
    """Index tensors for attention over one row; the same for all layers.

    Attributes:
        buckets: cover the row's segments, shortest first.
        query_index: [sum of n * Lq] int64, row token of each bucket's queries, one bucket after another; None where that is the row
            itself.
        key_index: [sum of n * Lk] int64, the same for keys, where a prefix precedes its segment; None where that is the row itself.
        restore: [R] int64, index of each row token among the queries; None with query_index.
        longest_span: most tokens that one token attends to.
        varlen: the plan for the kernel of `offbeat.model.varlen`; None where tokens attend to later ones, which it cannot compute.
        context: the ranks over whose slices the row is spread; None where all of it runs here.
        num_calls: number of layers that used the plan so far. A model that ignores it would silently mix sequences, so callers check this.
        routes: [R, K], the experts that the tokens which run here are to use; None where routers choose.
    """

    buckets: tuple[Bucket, ...]
    query_index: Tensor | None
    key_index: Tensor | None
    restore: Tensor | None
    longest_span: int
    varlen: VarlenPlan | None
    context: ContextGroup | None = None
    num_calls: int = 0
    routes: Tensor | None = None
    _masks: dict[int | None, list[Tensor | None]] = field(default_factory=dict)

    def masks(self, window: int | None, device: torch.device) -> list[Tensor | None]:
        """Return the mask [N or 1, 1, Lq, Lk] of each bucket for layers with this window; made once, on the device of the first."""
        if window is not None and window >= self.longest_span:
            window = None
        if window not in self._masks:
            masks = [bucket.mask if window is None else bucket.window_mask(window) for bucket in self.buckets]
            self._masks[window] = [None if mask is None else upload(mask, device) for mask in masks]
        return self._masks[window]


def build_plan(
    row: PackedRow, device: torch.device | str = "cpu", *, context: ContextGroup | None = None, seen: np.ndarray | None = None,
) -> AttentionPlan:
    """Group the segments of a row into buckets of similar length.

    Args:
        row: R tokens in S segments; fastest when segments are sorted by length, as in the families of `pack_row`.
        context: the ranks over which the row is spread, whose number divides R.
        seen: [R] int64, the last position in its own sequence to which each token attends, where that may be a later one of the same
            segment; None is causal attention.

    Returns:
        A plan for forward passes over this row only. Padding is at most a quarter of a bucket's queries, and of its keys. Segments of
        equal length without prefixes are computed without copying.
    """
    segments = row.segments
    order = np.lexsort((segments.prefix_lengths, segments.lengths, segments.prefix >= 0))
    buckets, queries, keys, real = [], [], [], []
    for low, high in bucket_bounds(segments.lengths[order], segments.prefix_lengths[order]):
        chosen = order[low:high]
        starts, lengths, prefix = segments.starts[chosen], segments.lengths[chosen], segments.prefix[chosen]
        own = _padded_ranges(starts, lengths)
        queries.append(own)
        real.append(np.arange(own.shape[1]) < lengths[:, None])
        if prefix[0] < 0:
            # Padding follows the real tokens, where causal attention never looks.
            keys.append(own)
        else:
            keys.append(np.concatenate([_padded_ranges(segments.starts[prefix], segments.lengths[prefix]), own], axis=1))
        later = None if seen is None or (seen[own] == row.positions[own]).all() else seen[own]
        buckets.append(Bucket(own.shape[0], own.shape[1], keys[-1].shape[1], segments.prefix_lengths[chosen], later))
    # Queries of all buckets in one list, padding included. `real` marks the copies that are not padding, and `restore` inverts the list.
    query_index = _joined(queries)
    place = np.flatnonzero(_joined(real))
    restore = np.empty(len(row), np.int64)
    restore[query_index[place]] = place
    moved = len(query_index) > len(row) or (order[1:] < order[:-1]).any()
    prefixed = bool((segments.prefix >= 0).any())
    return AttentionPlan(
        buckets=tuple(buckets), query_index=upload(query_index, device) if moved else None,
        key_index=upload(_joined(keys), device) if moved or prefixed else None, restore=upload(restore, device) if moved else None,
        longest_span=segments.longest_span, varlen=VarlenPlan(segments, torch.device(device)) if seen is None else None, context=context,
    )


def packed_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, sliding_window: int | None = None, attention_plan: AttentionPlan | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, in the signature of transformers' AttentionInterface.

    Args:
        query: [1, H, R, D] float; where the row is spread, this rank's tokens of it here and below.
        key, value: [1, Hkv, R, D]; H is a multiple of Hkv.
        attention_mask: must be None when a plan is given.
        sliding_window: most tokens that a token attends to, itself included, by their positions in their own sequence.
        attention_plan: the plan of this row; None computes each row of a batch as one causal sequence.
        kwargs: `softcap`, and `s_aux` for sinks; see `ScoreForm`.

    Returns:
        The output, [1, R, H, D] in the dtype of value, and None in place of attention weights.

    Raises:
        ModelError: the layer needs a form of attention that packed rows do not have.
    """
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    set_routes(None if attention_plan is None else attention_plan.routes)
    if attention_plan is None:
        if attention_mask is None and query.shape[2] == key.shape[2]:
            attention_mask = window_mask(query.shape[2], sliding_window, query.device)
        if softcap is not None or sinks is not None:
            output = explicit_attention(query, key, value, attention_mask, form=ScoreForm(scaling, softcap, sinks, dropout))
            return output.transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    refuse_unknown(module, sliding_window, kwargs)
    if query.shape[0] != 1 or attention_mask is not None:
        raise ModelError(
            f"packed attention takes one row and no attention_mask, got {query.shape[0]} rows"
            f"{'' if attention_mask is None else ' and a mask'}; put all sequences in one row"
        )
    attention_plan.num_calls += 1
    # As [R, heads, D], which is their order in memory in transformers' layers.
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # Rotary positions are computed in float32, so queries and keys come as that, though values do not.
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    if (context := attention_plan.context) is not None:
        query, key, value = context.to_heads(query, key, value)
        sinks = None if sinks is None else context.own_heads(sinks)
    varlen = attention_plan.varlen
    if varlen is not None and serves(query, key, value, dropout=dropout, plain=softcap is None and sinks is None):
        output = varlen_attention(query, key, value, varlen.calls(sliding_window), scale=scaling)
    else:
        output = _by_buckets(query, key, value, attention_plan, window=sliding_window, form=ScoreForm(scaling, softcap, sinks, dropout))
    return (output if context is None else context.to_tokens(output)).unsqueeze(0), None


def refuse_unknown(module: torch.nn.Module, window: int | None, kwargs: dict[str, Any]) -> None:
    """Refuse, with ModelError, a layer whose form of attention is not computed here, or whose configuration contradicts its request."""
    name = type(module).__name__
    if kwargs.get("position_bias") is not None:
        raise ModelError(f"{name} adds its own bias to the scores of attention (position_bias), which is not computed; use another model")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{name} lets tokens attend to later ones, so it cannot score what it generates; use another model")
    layer_types = getattr(getattr(module, "config", None), "layer_types", None)
    kind = layer_types[module.layer_idx] if layer_types and isinstance(getattr(module, "layer_idx", None), int) else "full_attention"
    if kind not in ATTENTION_KINDS or (kind == "sliding_attention" and window is None):
        raise ModelError(f"{name} is of kind {kind} but asks for plain causal attention, which would be silently wrong; use another model")


@dataclass(frozen=True)
class ScoreForm:
    """How a layer turns products of queries and keys into shares.

    Attributes:
        scale: factor of the scores; None is D ** -0.5, for heads of size D.
        softcap: a cap c that turns scores s into c tanh(s / c), as in Gemma 2.
        sinks: [H], an extra score per head whose share of the softmax is discarded, as in GPT-OSS.
        dropout: share of the shares that are dropped.
    """

    scale: float | None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether torch's own attention computes it."""
        return self.softcap is None and self.sinks is None


def explicit_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, form: ScoreForm) -> Tensor:
    """Compute attention with softcap or sinks, which `scaled_dot_product_attention` lacks; holds all scores [N, H, Lq, Lk] in memory.

    Args:
        query: [N, H, Lq, D] float; the result has its shape, and the dtype of value.
        key, value: [N, Hkv, Lk, D]; H is a multiple of Hkv.
        mask: [N or 1, 1, Lq, Lk] or [Lq, Lk], bool or added to the scores; None is causal, where Lq = Lk.
    """
    n, num_heads, length, head_dim = query.shape
    factor = head_dim**-0.5 if form.scale is None else form.scale
    softcap, sinks = form.softcap, form.sinks
    grouped = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)  # [N, Hkv, H / Hkv * Lq, D]: queries of one key head are adjacent
    scores = (grouped @ key.transpose(2, 3)).view(n, num_heads, length, -1) * factor
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(n, -1, length, 1)], dim=-1)
    # In float32 whatever the inputs are; a sink takes its share of the softmax and is then dropped.
    shares = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    if sinks is not None:
        shares = shares[..., :-1]
    if form.dropout:
        shares = torch.dropout(shares, form.dropout, train=True)
    attended = shares.reshape(n, key.shape[1], -1, key.shape[2]) @ value
    return attended.view(n, num_heads, length, -1)


def _by_buckets(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, *, window: int | None, form: ScoreForm) -> Tensor:
    """Attend over a row, bucket by bucket: [R, H, D] queries, [R, Hkv, D] keys and values to [R, H, D]."""
    buckets = plan.buckets
    queries = _gather(query, plan.query_index).split([bucket.n * bucket.num_queries for bucket in buckets])
    keys, values = (_gather(x, plan.key_index).split([bucket.n * bucket.num_keys for bucket in buckets]) for x in (key, value))
    outputs = [
        _attend(bucket, q, k, v, mask, form=form)
        for bucket, q, k, v, mask in zip(buckets, queries, keys, values, plan.masks(window, query.device), strict=True)]
    return _gather(outputs[0] if len(outputs) == 1 else torch.cat(outputs), plan.restore)


def _attend(bucket: Bucket, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, form: ScoreForm) -> Tensor:
    """Attend within a bucket: queries [N * Lq, H, D], keys and values [N * Lk, Hkv, D] to [N * Lq, H, D]."""
    q, k, v = (x.reshape(bucket.n, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    if not form.is_plain:
        output = explicit_attention(q, k, v, mask, form=form)
    else:
        output = fused_attention(q, k, v, mask, dropout=form.dropout, scale=form.scale)
    return output.transpose(1, 2).reshape(len(query), *output.shape[1::2])


def fused_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float | None, dropout: float = 0.0) -> Tensor:
    """Compute `explicit_attention`, without softcap and sinks, by a kernel that holds no scores in memory.

    On CUDA one takes fewer heads of keys than of queries only in half precision and without a mask; otherwise torch would take no kernel at
    all, so keys are copied for each head of queries there.
    """
    if query.device.type != "cpu" and query.shape[1] != key.shape[1] and (mask is not None or query.dtype.itemsize > 2):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1])


def _gather(rows: Tensor, index: Tensor | None) -> Tensor:
    if index is None:
        return rows
    # Written as an embedding, whose backward adds whole rows at once; index_select's is several times slower on a CPU.
    return embedding(index, rows.reshape(len(rows), -1)).view(len(index), *rows.shape[1:])


def bucket_bounds(lengths: np.ndarray, prefix_lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """Cut segments, in order, into buckets that waste at most _MAX_WASTE; segments with and without a prefix are never mixed.

    `lengths` and `prefix_lengths` [S] int64 are the tokens of each segment and before it. Yields the first and the last + 1 of each bucket.
    """
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
    """Tracks how much of a bucket is padding when its lengths are padded to the longest."""

    def __init__(self) -> None:
        self.count, self.total, self.longest = 0, 0, 0

    def fits(self, length: int) -> bool:
        padded = (self.count + 1) * max(self.longest, length)
        return padded - self.total - length <= _MAX_WASTE * padded

    def add(self, length: int) -> None:
        self.count, self.total, self.longest = self.count + 1, self.total + length, max(self.longest, length)


def _prefix_mask(prefix_lengths: np.ndarray, num_queries: int, window: int | None = None, *, seen: np.ndarray | None = None) -> np.ndarray:
    """Return [N, 1, Lq, width + Lq] bool: attention to a prefix and up to a position `seen` [N, Lq], or causal; or to the last `window`
    tokens of these. N is 1 for equally long prefixes where none is given.
    """
    width = int(prefix_lengths.max(initial=0))
    if (prefix_lengths == width).all() and seen is None:
        prefix_lengths = prefix_lengths[:1]
    mask = np.empty((len(prefix_lengths), 1, num_queries, width + num_queries), bool)
    mask[..., :width] = (np.arange(width) < prefix_lengths[:, None])[:, None, None]
    # Compare positions, not indices, since there may be padding between a prefix and its segment.
    query = prefix_lengths[:, None] + np.arange(num_queries)
    mask[..., width:] = np.tri(num_queries, dtype=bool) if seen is None else (query[:, None] <= seen[:, :, None])[:, None]
    if window is not None:
        key = np.concatenate([np.broadcast_to(np.arange(width), (len(query), width)), query], axis=1)
        mask &= (query[:, :, None] - key[:, None, :] < window)[:, None]
    return mask


def _padded_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return [N, longest] int64 row indices; padding repeats the last real one, and its copies get no gradient.

    For example starts [0, 3] and lengths [3, 2] give [[0, 1, 2], [3, 4, 4]].
    """
    return starts[:, None] + np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([part.ravel() for part in parts])


def window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return [L, L] bool, where each token attends to the last `window` ones; None where that is plain causal attention."""
    if window is None or length <= window:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _packed_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return no mask for plain rows, so that a packed row never builds an [R, R] one; padded batches and caches get the mask of "sdpa"."""
    if kwargs.get("attention_mask") is None and kwargs.get("q_length") == kwargs.get("kv_length"):
        return None
    return sdpa_mask(*args, **kwargs)


_planned = ContextVar("_planned", default=False)
_find_sequences = masking_utils.find_packed_sequence_indices


@contextmanager
def planned() -> Iterator[None]:
    """Surround a model's forward pass that has a plan: transformers need not look for the sequences of the row.

    It would read from the device whether there are several, and so wait for it; `_packed_mask` gives no mask in either case.
    """
    token = _planned.set(True)
    try:
        yield
    finally:
        _planned.reset(token)


def _find_unless_planned(position_ids: Tensor) -> Tensor | None:
    return None if _planned.get() else _find_sequences(position_ids)


masking_utils.find_packed_sequence_indices = _find_unless_planned
AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _packed_mask)
