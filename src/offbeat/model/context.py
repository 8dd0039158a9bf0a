"""Context parallelism: one row of tokens over the ranks of a group, for sequences whose activations exceed the memory of one rank.

Each of c ranks embeds one c-th of the row and takes it through the layers. Only attention needs the whole row: there ranks exchange tokens
for heads, attend within all tokens under their share of the heads, and exchange them back. Predictions are gathered, so that all ranks
compute the same losses. A rank's gradients are its slice's; their sum over the group is the row's.

`spread_rows` of `rows` makes a model run so; from then on `logprobs`, `values` and `top` score its rows by shares.

Source: DeepSpeed Ulysses, arXiv:2309.14509.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.data.packing import PackedRow, Segments
from offbeat.errors import ModelError
from offbeat.model.uploads import upload


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """The c ranks that run the slices of a row, in the order of the slices; all methods but `own_heads` are collective."""

    group: dist.ProcessGroup

    @cached_property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange a slice of the tokens with all heads for all tokens with a share of the heads.

        Args:
            query: [R / c, H, D] float.
            key, value: [R / c, Hkv, D] and [R / c, Hkv, Dv] in the same dtype; heads are repeated where there are too few of them.

        Returns [R, H / c, D], [R, h, D] and [R, h, Dv] with h = lcm(Hkv, c) / c, where H / c / h query heads share one key head. Raises
        ModelError if H is no multiple of c.
        """
        num_heads, num_key_heads = query.shape[1], key.shape[1]
        if num_heads % self.size:
            raise ModelError(
                f"{num_heads} heads of attention cannot be divided among the {self.size} ranks that share a row; set train.parallel.cp to"
                f" a divisor of {num_heads}")
        repeats = math.lcm(num_key_heads, self.size) // num_key_heads
        parts = [query, *(x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (key, value))]
        # As [c, R / c, heads times D], one block for each rank; queries, keys and values travel together.
        blocks = [part.unflatten(1, (self.size, -1)).flatten(2).transpose(0, 1) for part in parts]
        mine = exchanged(torch.cat(blocks, dim=2), self.group).flatten(0, 1).split([block.shape[2] for block in blocks], dim=1)
        query, key, value = (x.unflatten(1, (-1, part.shape[2])) for x, part in zip(mine, parts, strict=True))
        return query, key, value

    def to_tokens(self, output: Tensor) -> Tensor:
        """Exchange all tokens with a share of the heads [R, H / c, D] for a slice of the tokens with all heads [R / c, H, D]."""
        blocks = exchanged(output.flatten(1).unflatten(0, (self.size, -1)), self.group)
        return blocks.transpose(0, 1).flatten(1).unflatten(1, (-1, output.shape[2]))

    def own_heads(self, values: Tensor) -> Tensor:
        """Return the elements of [H] values that belong to this rank's heads, [H / c]."""
        return values.chunk(self.size)[self.rank]

    def gather(self, own: Tensor, which: np.ndarray, num: int) -> Tensor:
        """Gather the elements of all ranks, [M, ...] with M = `num`; this rank's `own` [m, ...] belong at `which` [m] int64, and only they.

        The gradient has only the rank's own part, because all ranks compute the same loss from the result.
        """
        return _Gathered.apply(own, upload(which, own.device), num, self.group)


@dataclass(frozen=True, eq=False)
class RowShare:
    """This rank's share of a row: everything, unless the model's rows are spread over a group.

    Attributes:
        row: the whole row, R tokens and M targets; its last token is repeated to a multiple of the group's size.
        context: the group; None for a row that is not spread.
        here: the tokens of the row that run here.
        which: [m] int64, ascending, the targets predicted here.
        source: [m] int64, the token that predicts each of them, counted from the first token here.
        target: [m] int64, their tokens.
    """

    row: PackedRow
    context: ContextGroup | None
    here: slice
    which: np.ndarray
    source: np.ndarray
    target: np.ndarray

    def gather(self, own: Tensor) -> Tensor:
        """Gather the values of the row's targets, [M, ...], from this rank's `own` [m, ...]; collective where the row is spread."""
        return own if self.context is None else self.context.gather(own, self.which, len(self.row.target))


_contexts: "WeakKeyDictionary[nn.Module, ContextGroup]" = WeakKeyDictionary()
"""Models whose rows are spread."""


def spread(model: nn.Module, context: ContextGroup | None) -> None:
    """Spread the rows of a bare model over a group from now on, or with None over no group any more."""
    if context is None:
        _contexts.pop(model, None)
    else:
        _contexts[model] = context


def share_of(model: nn.Module, row: PackedRow) -> RowShare:
    """Return this rank's share of a row under a model, which may be wrapped."""
    context = _contexts.get(getattr(model, "module", model))  # pyright: ignore[reportArgumentType]
    if context is None:
        return RowShare(row, None, slice(0, len(row)), np.arange(len(row.target)), row.source, row.target)
    row = _padded(row, context.size)
    length = len(row) // context.size
    here = slice(context.rank * length, (context.rank + 1) * length)
    which = np.flatnonzero((row.source >= here.start) & (row.source < here.stop))
    return RowShare(row, context, here, which, row.source[which] - here.start, row.target[which])


def _padded(row: PackedRow, multiple: int) -> PackedRow:
    """Repeat the last token of a row. The copies end the last segment, which is no other's prefix, so that no token attends to them."""
    extra = -len(row) % multiple
    if not extra:
        return row
    segments, lengths = row.segments, row.segments.lengths.copy()
    lengths[-1] += extra
    return PackedRow(
        np.pad(row.tokens, (0, extra), mode="edge"), np.pad(row.positions, (0, extra), mode="edge"),
        Segments(segments.starts, lengths, segments.prefix), row.source, row.target, row.batch_index, row.owner,
        None if row.routes is None else np.pad(row.routes, ((0, extra), (0, 0)), mode="edge"), row.supports)


def exchanged(rows: Tensor, group: dist.ProcessGroup, *, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
    """Give the i-th of c parts of some rows to rank i, and return those given to this rank, in the order of the ranks.

    The gradient goes back so; both directions are collective.

    Args:
        rows: [N, ...] float.
        sent, received: rows in each of the parts, to and from the ranks; by default N / c.
    """
    return _Exchanged.apply(rows, group, sent, received)


class _Exchanged(torch.autograd.Function):
    """See `exchanged`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, sent: list[int] | None, received: list[int] | None) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchange(rows, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], ctx.group, ctx.received, ctx.sent), None, None, None


def _exchange(rows: Tensor, group: dist.ProcessGroup, sent: list[int] | None, received: list[int] | None) -> Tensor:
    rows = rows.contiguous()
    came = torch.empty_like(rows) if received is None else rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(came, rows, output_split_sizes=received, input_split_sizes=sent, group=group)
    return came


class _Gathered(torch.autograd.Function):
    """See `ContextGroup.gather`."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, which: Tensor, num: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(which)
        # A sum with zeros is exact.
        values = own.new_zeros(num, *own.shape[1:]).index_copy_(0, which, own)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0][ctx.saved_tensors[0]], None, None, None
