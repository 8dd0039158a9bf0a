"""LoRA beside the base model's linear layers, with many adapters in one batch. `adapters` owns the stack; both forward paths use it.

`AdapterStack` holds the weights of the adapters that run now, one slot each, padded to a common rank. `AdapterRows` knows which rows of a
batch use which adapter: rows of one adapter are gathered into a segment, segments of equal length are one batched product, and the result
is added to the rows it belongs to. So a row's numbers depend on its own adapter alone, and rows of the base model are not touched.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offbeat.model.peft_io import Adapter
from offbeat.model.uploads import upload

BASE = -1
"""Slot number of a row that uses the base model alone."""

FIXED_ROWS = 32
"""Rows of every segment where an adapter's numbers must not depend on the batch: products of one shape sum in one order."""

PIECE_COST = 32
"""Cost of one more pair of products, in rows of padding. (Measured: 35 rows at a hidden size of 128, 4 at 512.)"""


@dataclass(frozen=True)
class Linear:
    """A linear layer that can take an adapter, with its name in the base model."""

    name: str
    inputs: int
    outputs: int


Groups = Mapping[str, tuple[Linear, ...]]
"""Layers that read the same input, by the name under which a forward path computes them together; their outputs are concatenated."""


@dataclass(frozen=True, eq=False)
class GroupWeights:
    """Stacked weights of a group. B is cut into blocks of outputs, so that layers of one group need no zero padding beside each other.

    Attributes:
        a: [slots, inputs, layers * rank] float32.
        b: [slots, blocks, rank, width] float32; a layer's outputs are a run of adjacent blocks.
        layer: [blocks], index of the layer that each block belongs to.
    """

    a: Tensor
    b: Tensor
    layer: tuple[int, ...]

    @classmethod
    def zeros(cls, linears: tuple[Linear, ...], *, slots: int, rank: int, device: torch.device) -> "GroupWeights":
        width = math.gcd(*(linear.outputs for linear in linears))
        layer = tuple(i for i, linear in enumerate(linears) for _ in range(linear.outputs // width))
        a = torch.zeros(slots, linears[0].inputs, len(linears) * rank, device=device)
        return cls(a, torch.zeros(slots, len(layer), rank, width, device=device), layer)


class AdapterStack:
    """Weights of adapters, always in float32; those that run occupy the slots 0..n-1.

    The slots after them keep adapters that ran before until their room is needed, so that an adapter that returns is not written again.

    Attributes:
        adapters: [n], the running adapters by slot.
        layout: number of changes of the slots; an `AdapterRows` is valid only for the layout that it was made for.
    """

    def __init__(self, groups: Groups, *, device: torch.device, least_rank: int = 1) -> None:
        """`least_rank` is the common rank of adapters that have no larger one."""
        self.adapters: list[Adapter] = []
        self._least_rank = least_rank
        self._held: list[Adapter] = []
        self.layout = 0
        self.device = device
        self._groups = groups
        self._capacity = 0
        self._rank = 0
        self._weights: dict[str, GroupWeights] = {}

    def weights(self, group: str) -> GroupWeights | None:
        """Return the weights of a group; None if no running adapter adapts it."""
        return self._weights.get(group)

    def place(self, wanted: Iterable[Adapter]) -> None:
        """Make exactly these adapters run; writes and moves as little as possible."""
        wanted = dict.fromkeys(wanted)
        if wanted.keys() == set(self.adapters):
            return
        self.layout += 1
        if wanted:
            self._resize(wanted)
        # Evict the adapters that have just stopped first: they hold the front slots, so their replacements need not be moved there.
        idle = [slot for slot, adapter in enumerate(self._held) if adapter not in wanted]
        for adapter in wanted:
            if adapter not in self._held:
                slot = len(self._held) if len(self._held) < self._capacity else idle.pop(0)
                self._held[slot : slot + 1] = [adapter]
                self._write(slot, adapter)
        behind = [slot for slot in range(len(wanted), len(self._held)) if self._held[slot] in wanted]
        for slot in range(len(wanted)):
            if self._held[slot] not in wanted:
                self._swap(slot, behind.pop())
        self.adapters = self._held[: len(wanted)]

    def _swap(self, one: int, other: int) -> None:
        self._held[one], self._held[other] = self._held[other], self._held[one]
        for weights in self._weights.values():
            for stacked in (weights.a, weights.b):
                kept = stacked[one].clone()  # a list of indices would come from the host
                stacked[one] = stacked[other]
                stacked[other] = kept

    def read(self, adapter: Adapter) -> Adapter:
        """Copy an adapter back out of its slot, so that it holds the numbers that serve."""
        slot, rank = self.adapters.index(adapter), adapter.rank
        pairs = {}
        for group, weights in self._weights.items():
            for linear, columns, blocks in self._places(group, rank):
                if linear.name in adapter.pairs:
                    down, up = weights.a[slot, :, columns].t(), weights.b[slot, blocks, :rank].transpose(1, 2).reshape(linear.outputs, rank)
                    pairs[linear.name] = (_copy(down), _copy(up))
        return Adapter(rank, adapter.scaling, pairs)

    def _resize(self, wanted: Collection[Adapter]) -> None:
        """Empty and reallocate the stack if it lacks slots, or does not have exactly the wanted rank and groups."""
        modules = {module for adapter in wanted for module in adapter.pairs}
        groups = [group for group, linears in self._groups.items() if any(linear.name in modules for linear in linears)]
        count, rank = len(wanted), max(self._least_rank, *(adapter.rank for adapter in wanted))
        if count <= self._capacity and rank == self._rank and groups == list(self._weights):
            return
        # Doubled, so that adapters that start one after the other are copied twice on average.
        self._capacity = max(self._capacity, 1 << (count - 1).bit_length())
        self._rank = rank
        self.adapters, self._held, self._weights = [], [], {}
        for group in groups:
            self._weights[group] = GroupWeights.zeros(self._groups[group], slots=self._capacity, rank=rank, device=self.device)

    def _write(self, slot: int, adapter: Adapter) -> None:
        rank = adapter.rank
        for group, weights in self._weights.items():
            weights.a[slot], weights.b[slot] = 0, 0
            for linear, columns, blocks in self._places(group, rank):
                if linear.name in adapter.pairs:
                    # Copied to the device first: a strided copy to it would go through another copy on the host.
                    down, up = (upload(tensor, self.device) for tensor in adapter.pairs[linear.name])
                    weights.a[slot, :, columns] = down.t()
                    weights.b[slot, blocks, :rank] = up.view(blocks.stop - blocks.start, -1, rank).transpose(1, 2)

    def _places(self, group: str, rank: int) -> Iterable[tuple[Linear, slice, slice]]:
        """Yield each layer of a group with its columns of A and its blocks of B."""
        first, width = 0, self._weights[group].b.shape[3]
        for i, linear in enumerate(self._groups[group]):
            last = first + linear.outputs // width
            yield linear, slice(i * self._rank, i * self._rank + rank), slice(first, last)
            first = last


def _copy(matrix: Tensor) -> Tensor:
    return matrix.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Piece:
    """Segments of equal length for adjacent slots, computed by one batched product: `length` of the gathered `rows` for each slot."""

    slots: slice
    rows: slice
    length: int


@dataclass(frozen=True, eq=False)
class GatheredSegments:
    """The rows of a batch, gathered by adapter.

    Attributes:
        pieces: consecutive ranges of the gathered rows.
        index: [M] int64, the batch row that each gathered row copies.
        padding: [M] bool. Padding repeats a row of the same adapter, so that even NaN or inf stay within their own adapter.
        slot: [M] int64, the slot of each gathered row.
    """

    pieces: list[Piece]
    index: np.ndarray
    padding: np.ndarray
    slot: np.ndarray


def segment(slots: np.ndarray, *, fixed: bool = False) -> GatheredSegments:
    """Gather the rows of each slot: first a segment of one common length for every slot, then the remainder of longer ones.

    Args:
        slots: [N] int64, such as [0, 2, 0, -1], the slot of each row's adapter or `BASE`; at least one row has an adapter.
        fixed: whether all segments have `FIXED_ROWS` rows, padding included, and a slot as many segments as it needs.
    """
    # Rows sorted by slot, without those of the base model, whose slot is negative.
    order = np.argsort(slots, kind="stable")
    order = order[np.searchsorted(slots[order], 0) :]
    used, counts = np.unique(slots[order], return_counts=True)
    number = np.repeat(np.arange(len(used)), counts)  # index of each row's slot among the used ones
    starts = np.cumsum(counts) - counts
    place = np.arange(len(order)) - starts[number]
    if fixed:
        return _in_segments(order, used=used, counts=counts)
    length = shared_length(counts)
    here = place < length
    index, padding = np.repeat(order[starts], length), np.ones(length * len(used), bool)
    target = number[here] * length + place[here]
    index[target], padding[target] = order[here], False
    pieces: list[Piece] = []

    def add(first: int, stop: int, length: int) -> None:
        row = pieces[-1].rows.stop if pieces else 0
        pieces.append(Piece(slice(first, stop), slice(row, row + (stop - first) * length), length))

    for run in np.split(used, np.flatnonzero(np.diff(used) > 1) + 1):
        add(int(run[0]), int(run[-1]) + 1, length)
    for slot, count in zip(used.tolist(), counts.tolist(), strict=True):
        if count > length:
            add(slot, slot + 1, count - length)
    return GatheredSegments(
        pieces, index=np.append(index, order[~here]), padding=np.append(padding, np.zeros(np.count_nonzero(~here), bool)),
        slot=np.append(np.repeat(used, length), used[number[~here]]),
    )


def _in_segments(order: np.ndarray, *, used: np.ndarray, counts: np.ndarray) -> GatheredSegments:
    """Gather rows in segments of `FIXED_ROWS`.

    `order` [M] int64 are the batch rows with an adapter, by slot; `used` and `counts` [S] int64 the slots and their numbers of rows.
    """
    index, padding, slot, pieces = [], [], [], []
    for own, rows in zip(used.tolist(), np.split(order, np.cumsum(counts)[:-1]), strict=True):
        for first in range(0, len(rows), FIXED_ROWS):
            here = rows[first : first + FIXED_ROWS]
            missing = FIXED_ROWS - len(here)
            row = len(pieces) * FIXED_ROWS
            pieces.append(Piece(slice(own, own + 1), slice(row, row + FIXED_ROWS), FIXED_ROWS))
            index.append(np.append(here, np.repeat(here[:1], missing)))
            padding.append(np.arange(FIXED_ROWS) >= len(here))
            slot.append(np.full(FIXED_ROWS, own))
    return GatheredSegments(pieces, index=np.concatenate(index), padding=np.concatenate(padding), slot=np.concatenate(slot))


def shared_length(counts: np.ndarray) -> int:
    """Choose the common segment length with the lowest cost of padding and products, one of the `counts` [N] int64 of rows of each slot.

    Rows of a slot beyond it are computed separately.
    """
    lengths = np.unique(counts)[:, None]
    above = np.maximum(counts - lengths, 0)
    cost = lengths[:, 0] * len(counts) + above.sum(axis=1) + PIECE_COST * (above > 0).sum(axis=1)
    return int(lengths[cost.argmin(), 0])


class AdapterRows:
    """The adapters of a batch's rows; made anew when rows come or go, and used for all steps and layers in between.

    `reached` are the groups of layers in which adapters have taken part; a caller may empty it before a forward pass.
    """

    def __init__(self, stack: AdapterStack, slots: np.ndarray, *, fixed: bool = False) -> None:
        """`slots` [N] int64, the slot of each row, refer to the stack's current layout; see `segment`."""
        segments = segment(slots, fixed=fixed)
        scaling = np.array([adapter.scaling for adapter in stack.adapters], np.float32)[segments.slot]
        self.reached: set[str] = set()
        self._stack = stack
        self._slots, self._fixed = slots, fixed
        self._pieces = segments.pieces
        self._rows = segments.index
        self._index = self._send(segments.index)
        self._weight = self._send(np.where(segments.padding, 0, scaling)[:, None])
        self._of_blocks: dict[tuple[int, ...], tuple[Tensor | None, Tensor]] = {(0,): (None, self._index)}

    def add(self, group: str, x: Tensor, y: Tensor) -> None:
        """Add the adapters' contribution, from the input x [N, inputs] of a group of layers, to its output y [N, outputs], contiguous."""
        weights = self._stack.weights(group)
        if weights is None:
            return
        self.reached.add(group)
        _, blocks, rank, width = weights.b.shape
        source, target = self._of_blocks.get(weights.layer) or self._find_blocks(weights.layer)
        low = self._products(x.index_select(0, self._index).float(), weights.a, times=1).mul_(self._weight)
        if source is not None:
            low = low.view(-1, rank).index_select(0, source)
        delta = self._products(low, weights.b.flatten(0, 1), times=blocks)
        y.view(-1, width).index_add_(0, target, delta.to(y.dtype))

    def adapts(self, group: str) -> bool:
        """Whether an adapter that runs adapts a group."""
        return self._stack.weights(group) is not None

    def subset(self, rows: Tensor) -> "AdapterRows | None":
        """Return the adapters of some of the rows, [n] int64; None if none of them has one."""
        slots = self._slots[rows.cpu().numpy()]
        if not (slots >= 0).any():
            return None
        some = AdapterRows(self._stack, slots, fixed=self._fixed)
        some.reached = self.reached
        return some

    def _products(self, x: Tensor, weights: Tensor, *, times: int) -> Tensor:
        """Multiply each gathered row by the `times` matrices of its slot: [M * times, i] and [slots * times, i, o] to [M * times, o]."""
        spans = [(_scaled(piece.rows, times), weights[_scaled(piece.slots, times)]) for piece in self._pieces]
        if len(spans) == 1:
            ((_, own),) = spans
            return torch.bmm(x.view(len(own), -1, x.shape[1]), own).flatten(0, 1)
        result = x.new_empty(len(x), weights.shape[2])
        for rows, own in spans:
            torch.bmm(x[rows].view(len(own), -1, x.shape[1]), own, out=result[rows].view(len(own), -1, weights.shape[2]))
        return result

    def _find_blocks(self, layer: tuple[int, ...]) -> tuple[Tensor | None, Tensor]:
        """Find the rows that the blocks of a group multiply and where their products belong, ordered by slot, then block, then row.

        Returns:
            source: [M * blocks] int64, rows of the product with A, seen as [M * layers, rank]; None where both are the same.
            target: [M * blocks] int64, rows of the output, seen as [rows * blocks, width].
        """
        gathered = np.arange(len(self._rows))
        each = [gathered[piece.rows].reshape(-1, 1, piece.length) for piece in self._pieces]
        source = np.concatenate([(rows * (max(layer) + 1) + np.array(layer)[:, None]).ravel() for rows in each])
        target = np.concatenate([(self._rows[rows] * len(layer) + np.arange(len(layer))[:, None]).ravel() for rows in each])
        self._of_blocks[layer] = self._send(source), self._send(target)
        return self._of_blocks[layer]

    def _send(self, array: np.ndarray) -> Tensor:
        return upload(array, self._stack.device)


def _scaled(span: slice, factor: int) -> slice:
    return slice(span.start * factor, span.stop * factor)
