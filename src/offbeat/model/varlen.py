"""Attention over packed rows by torch's flash kernel for sequences of many lengths, where a device has one; called by `packed_attention`.

A row is one call: no segment is padded, nothing is masked. A shared prefix is a second call, in which the tokens of all samples that share
it are the queries of one sequence, so that its keys are read once and not once per sample. The two results are merged by their log-sum-exp
of scores. So are their gradients: the share of a key in the whole softmax is exp(score - log-sum-exp), so the kernel's backward pass, given
the merged output and the merged log-sum-exp, computes a call's part of the whole gradient. In layers with a sliding window a token sees
little of its prefix, which is copied before each sample instead.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from offbeat.data.packing import Segments
from offbeat.model.uploads import upload

_DEVICES = frozenset({"cuda"})
_DTYPES = frozenset({torch.bfloat16, torch.float16})
_MAX_HEAD_DIM = 256


@dataclass(frozen=True, eq=False)
class KernelCall:
    """n sequences of queries, each with its own keys, all in one call of the kernel.

    Attributes:
        query_index: [U] int64, tokens of the row that are queries, in the order of their sequences; None for all tokens in order.
        key_index: [K] int64, the same for keys, which may repeat.
        query_bounds, key_bounds: [n + 1] int32, where sequences begin and end among the queries and the keys.
        most_queries, most_keys: length of the longest sequence.
        causal: whether the last query of a sequence sees all keys, and each earlier one a key less; otherwise all see all.
        window: most keys that a query sees, if it is causal; None is all.
    """

    query_index: Tensor | None
    key_index: Tensor | None
    query_bounds: Tensor
    key_bounds: Tensor
    most_queries: int
    most_keys: int
    causal: bool
    window: int | None = None

    @property
    def window_size(self) -> list[int]:
        """Keys that a query sees to the left and to the right of its own key, such as [-1, 0]; -1 is without end."""
        return [-1 if self.window is None else self.window - 1, 0 if self.causal else -1]


@dataclass(eq=False)
class VarlenPlan:
    """The calls for one row; the same for all layers of one window."""

    segments: Segments
    device: torch.device
    _calls: dict[int | None, tuple[KernelCall, ...]] = field(default_factory=dict)

    def calls(self, window: int | None) -> tuple[KernelCall, ...]:
        """Return the calls whose merged results are the attention of layers with this window; all tokens are queries of the first."""
        if window is not None and window >= self.segments.longest_span:
            window = None
        if window not in self._calls:
            self._calls[window] = self._full() if window is None else (self._windowed(window),)
        return self._calls[window]

    def _full(self) -> tuple[KernelCall, ...]:
        segments = self.segments
        own = self._call_kernel(segments.lengths, segments.lengths, causal=True)
        order = np.flatnonzero(segments.prefix >= 0)
        if not len(order):
            return (own,)
        order = order[np.argsort(segments.prefix[order], kind="stable")]
        prefixes, firsts = np.unique(segments.prefix[order], return_index=True)
        return own, self._call_kernel(
            np.add.reduceat(segments.lengths[order], firsts), segments.lengths[prefixes], causal=False,
            queries=_ranges(segments.starts[order], segments.lengths[order]),
            keys=_ranges(segments.starts[prefixes], segments.lengths[prefixes]))

    def _windowed(self, window: int) -> KernelCall:
        """Make one call, in which each segment's keys follow the last keys of its prefix that its first token sees."""
        segments = self.segments
        before = np.minimum(segments.prefix_lengths, window - 1)
        ends = np.where(segments.prefix >= 0, segments.starts[segments.prefix] + segments.prefix_lengths, segments.starts)
        keys = _ranges(np.stack([ends - before, segments.starts], 1).ravel(), np.stack([before, segments.lengths], 1).ravel())
        return self._call_kernel(
            segments.lengths, before + segments.lengths, causal=True, window=window, keys=keys if before.any() else None)

    def _call_kernel(
        self, queries_per: np.ndarray, keys_per: np.ndarray, *, causal: bool, window: int | None = None, queries: np.ndarray | None = None,
        keys: np.ndarray | None = None,
    ) -> KernelCall:
        def place(array: np.ndarray | None) -> Tensor | None:
            return None if array is None else upload(array, self.device)

        def bounds(lengths: np.ndarray) -> Tensor:
            return upload(np.cumsum([0, *lengths]).astype(np.int32), self.device)

        return KernelCall(
            place(queries), place(keys), bounds(queries_per), bounds(keys_per), int(queries_per.max()), int(keys_per.max()), causal, window)


def serves(query: Tensor, key: Tensor, value: Tensor, *, dropout: float, plain: bool) -> bool:
    """Whether the kernel computes a layer's attention; the one place that decides. On fake tensors it stands for whatever kernel the
    device has, so that memory can be estimated.

    Args:
        query, key, value: [..., D] each; the kernel is for half precision and one D, a multiple of 8 and at most 256. Latent attention
            has values of another width.
        plain: whether the layer asks for neither capped scores nor sinks, which the kernel lacks.
    """
    head_dim = query.shape[-1]
    if any((x.shape[-1], x.dtype) != (head_dim, query.dtype) for x in (key, value)):
        return False
    if query.device.type != "cpu" and isinstance(query, FakeTensor):
        return plain
    return (
        query.device.type in _DEVICES and query.dtype in _DTYPES and not dropout and plain and head_dim % 8 == 0
        and head_dim <= _MAX_HEAD_DIM)


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, calls: tuple[KernelCall, ...], *, scale: float | None) -> Tensor:
    """Attend over a row; returns [R, H, D], with gradient.

    Args:
        query: [R, H, D].
        key, value: [R, Hkv, D]; H is a multiple of Hkv.
        calls: from `VarlenPlan.calls`.
        scale: factor of the scores; None is D ** -0.5.
    """
    return _Varlen.apply(query, key, value, calls, scale)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: tuple[KernelCall, ...], scale: float | None) -> Tensor:
        forward, _ = _kernel()
        first, *others = calls
        out, lse = forward(query, _at(key, first.key_index), _at(value, first.key_index), first, scale)
        for call in others:
            index = call.query_index
            assert index is not None, "only the first call has all tokens"
            part, part_lse = forward(query[index], _at(key, call.key_index), _at(value, call.key_index), call, scale)
            own, own_lse = out[index], lse[:, index]
            share = torch.sigmoid(part_lse - own_lse).t().unsqueeze(-1)  # [U, H, 1] float32, the share of this call's keys
            merged = torch.lerp(own.to(share.dtype), part.to(share.dtype), share).to(out.dtype)
            # Not in place: selective checkpointing may have kept the kernel's results.
            out, lse = out.index_copy(0, index, merged), lse.index_copy(1, index, torch.logaddexp(own_lse, part_lse))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value; `grads` holds the gradient of the output [R, H, D]."""
        _, backward = _kernel()
        query, key, value, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        first, *others = ctx.calls
        grad_query, grad_key, grad_value = backward(
            grad, query, _at(key, first.key_index), _at(value, first.key_index), out, lse, first, ctx.scale)
        grad_key, grad_value = (_sum_at(part, first.key_index, of) for part, of in ((grad_key, key), (grad_value, value)))
        for call in others:
            index = call.query_index
            grads_of_call = backward(
                grad[index], query[index], _at(key, call.key_index), _at(value, call.key_index), out[index], lse[:, index].contiguous(),
                call, ctx.scale)
            # The tokens of these calls are all different, so a sum has two terms and its order does not matter.
            for whole, part, where in zip(
                (grad_query, grad_key, grad_value), grads_of_call, (index, call.key_index, call.key_index), strict=True,
            ):
                whole.index_add_(0, where, part)
        return grad_query, grad_key, grad_value, None, None


Forward = Callable[[Tensor, Tensor, Tensor, KernelCall, float | None], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, KernelCall, float | None], tuple[Tensor, Tensor, Tensor]]


@cache
def _kernel() -> tuple[Forward, Backward]:
    """Return the kernel: queries, keys and values to the output [U, H, D] and the log-sum-exp [H, U] float32, and back."""
    import_module("torch.nn.attention.varlen")  # takes seconds, which a process without such a device need not wait for
    ops = torch.ops.torch_attn
    # Since torch 2.12 it wants to be told where several queries share a key; before, it computes the same without a word.
    tells = any(argument.name == "enable_gqa" for argument in ops._varlen_attn.default._schema.arguments)

    def forward(query: Tensor, key: Tensor, value: Tensor, call: KernelCall, scale: float | None) -> tuple[Tensor, Tensor]:
        shared = (query.shape[1] != key.shape[1],) if tells else ()
        out, lse, _ = ops._varlen_attn(
            query, key, value, call.query_bounds, call.key_bounds, call.most_queries, call.most_keys, call.window_size == [-1, 0], scale,
            call.window_size, *shared)
        return out, lse

    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: KernelCall, scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of a dropout that there is not
        return ops._varlen_attn_backward(
            grad, query, key, value, out, lse, call.query_bounds, call.key_bounds, call.most_queries, call.most_keys,
            call.window_size == [-1, 0], state, scale, call.window_size)

    return forward, backward


def _at(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else rows[index]


def _sum_at(part: Tensor, index: Tensor | None, like: Tensor) -> Tensor:
    """Sum rows [N, H, D] that belong to the same token, in float32 at least, to the shape of `like` [R, H, D]."""
    if index is None:
        return part
    wide = torch.promote_types(part.dtype, torch.float32)
    return torch.zeros_like(like, dtype=wide).index_add_(0, index, part.to(wide)).to(like.dtype)


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return [T] int64, the indices of runs, one after the other: starts [0, 5] and lengths [2, 3] give [0, 1, 5, 6, 7]."""
    offsets = np.cumsum(lengths) - lengths
    return np.repeat(starts - offsets, lengths) + np.arange(lengths.sum())
