"""LoRA beside the base model's linear layers, many adapters in one batch. `adapters` keeps the stack, both forward paths use the batches.

`AdapterStack` holds the weights of the adapters that run now, one slot each, padded to one rank. `AdapterRows` knows which rows of a batch
use which: rows of one adapter are gathered into a segment, segments of equal length are one batched product, and the result is added to
the rows that it belongs to. So a row's numbers depend on its own adapter alone, and rows of the base model are not touched.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offbeat.model.peft_io import Adapter

BASE = -1
"""Stands for a slot where a row uses the base model alone."""

PIECE_COST = 32
"""What one more pair of products costs, in rows of padding. (Measured: 35 rows at a hidden size of 128, 4 at 512.)"""


@dataclass(frozen=True)
class Linear:
    """A linear layer that can be adapted, by its name in the base model."""

    name: str
    inputs: int
    outputs: int


Groups = Mapping[str, tuple[Linear, ...]]
"""Layers that read the same input, by the name under which a forward path computes them together; their outputs stand side by side."""


@dataclass(frozen=True, eq=False)
class GroupWeights:
    """Stacked weights of a group. B is cut into blocks of outputs, so that layers of one group need no zeros beside each other.

    Attributes:
        a: [slots, inputs, layers * rank].
        b: [slots, blocks, rank, width]; a layer's outputs are some neighbouring blocks.
        layer: [blocks] int64, whose block each is.
    """

    a: Tensor
    b: Tensor
    layer: Tensor

    @classmethod
    def zeros(cls, linears: tuple[Linear, ...], *, slots: int, rank: int, device: torch.device) -> "GroupWeights":
        width = math.gcd(*(linear.outputs for linear in linears))
        layer = [i for i, linear in enumerate(linears) for _ in range(linear.outputs // width)]
        a = torch.zeros(slots, linears[0].inputs, len(linears) * rank, device=device)
        return cls(a, torch.zeros(slots, len(layer), rank, width, device=device), torch.tensor(layer).to(device))


class AdapterStack:
    """Weights of adapters in the dense slots 0..n-1, float32 whatever the base model's format is.

    Attributes:
        adapters: [n], by slot.
        layout: counts changes of the slots; an `AdapterRows` serves the layout that it was made for.
    """

    def __init__(self, groups: Groups, *, device: torch.device) -> None:
        self.adapters: list[Adapter] = []
        self.layout = 0
        self.device = device
        self._groups = groups
        self._capacity = 0
        self._rank = 0
        self._weights: dict[str, GroupWeights] = {}

    def weights(self, group: str) -> GroupWeights | None:
        """None if no adapter is beside the group."""
        return self._weights.get(group)

    def place(self, wanted: Iterable[Adapter]) -> None:
        """Hold these adapters and no others; moves and copies as little as possible."""
        wanted = dict.fromkeys(wanted)
        if wanted.keys() == set(self.adapters):
            return
        self.layout += 1
        if wanted:
            self._resize(wanted)
        missing = [adapter for adapter in wanted if adapter not in self.adapters]
        holes = [slot for slot, adapter in enumerate(self.adapters) if adapter not in wanted]
        for adapter in missing:
            slot = holes.pop(0) if holes else len(self.adapters)
            self.adapters[slot : slot + 1] = [adapter]
            self._write(slot, adapter)
        for slot in reversed(holes):
            last = self.adapters.pop()
            if slot < len(self.adapters):
                self.adapters[slot] = last
                for weights in self._weights.values():
                    for stacked in (weights.a, weights.b):
                        stacked[slot] = stacked[len(self.adapters)]

    def read(self, adapter: Adapter) -> Adapter:
        """A copy of an adapter as its slot holds it: what serves, taken apart again."""
        slot, rank = self.adapters.index(adapter), adapter.rank
        pairs = {}
        for group, weights in self._weights.items():
            for linear, columns, blocks in self._places(group, rank):
                if linear.name in adapter.pairs:
                    down, up = weights.a[slot, :, columns].t(), weights.b[slot, blocks, :rank].transpose(1, 2).reshape(linear.outputs, rank)
                    pairs[linear.name] = (_copy(down), _copy(up))
        return Adapter(rank, adapter.scaling, pairs)

    def _resize(self, wanted: Collection[Adapter]) -> None:
        """Empty and reallocate the stack if it lacks slots, or has not just the rank and the groups that are wanted."""
        modules = {module for adapter in wanted for module in adapter.pairs}
        groups = [group for group, linears in self._groups.items() if any(linear.name in modules for linear in linears)]
        count, rank = len(wanted), max(adapter.rank for adapter in wanted)
        if count <= self._capacity and rank == self._rank and groups == list(self._weights):
            return
        # Doubled, so that adapters that start one after the other are copied twice on average.
        self._capacity = max(self._capacity, 1 << (count - 1).bit_length())
        self._rank = rank
        self.adapters, self._weights = [], {}
        for group in groups:
            self._weights[group] = GroupWeights.zeros(self._groups[group], slots=self._capacity, rank=rank, device=self.device)

    def _write(self, slot: int, adapter: Adapter) -> None:
        rank = adapter.rank
        for group, weights in self._weights.items():
            weights.a[slot], weights.b[slot] = 0, 0
            for linear, columns, blocks in self._places(group, rank):
                if linear.name in adapter.pairs:
                    # On the device first: a strided copy to it would go through another on the host.
                    down, up = (tensor.to(self.device) for tensor in adapter.pairs[linear.name])
                    weights.a[slot, :, columns] = down.t()
                    weights.b[slot, blocks, :rank] = up.view(blocks.stop - blocks.start, -1, rank).transpose(1, 2)

    def _places(self, group: str, rank: int) -> Iterable[tuple[Linear, slice, slice]]:
        """Each layer of a group, with its columns of A and its blocks of B."""
        first, width = 0, self._weights[group].b.shape[3]
        for i, linear in enumerate(self._groups[group]):
            last = first + linear.outputs // width
            yield linear, slice(i * self._rank, i * self._rank + rank), slice(first, last)
            first = last


def _copy(matrix: Tensor) -> Tensor:
    return matrix.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Piece:
    """Segments of equal length, one for each of some neighbouring slots, that one batched product computes.

    Attributes:
        rows: which of the gathered rows; `length` for each slot.
    """

    slots: slice
    rows: slice
    length: int

    @property
    def num_slots(self) -> int:
        return self.slots.stop - self.slots.start


@dataclass(frozen=True, eq=False)
class Segments:
    """How the rows of a batch are gathered.

    Attributes:
        pieces: one after the other in the gathered rows.
        index: [M] int64, the row that each gathered row is.
        padding: [M] bool. Padding repeats a row of the same adapter: even numbers that are not finite stay with their own adapter.
        slot: [M] int64, the slot of each gathered row.
    """

    pieces: list[Piece]
    index: np.ndarray
    padding: np.ndarray
    slot: np.ndarray


def segment(slots: np.ndarray) -> Segments:
    """Gather the rows of each slot: first segments of one length for all slots, then what some slots have above it.

    Args:
        slots: [rows] int64, the slot of each row's adapter or `BASE`; at least one row has an adapter.
    """
    order = np.argsort(slots, kind="stable")
    order = order[np.searchsorted(slots[order], 0) :]
    used, counts = np.unique(slots[order], return_counts=True)
    number = np.repeat(np.arange(len(used)), counts)  # of each row's slot among the used ones
    starts = np.cumsum(counts) - counts
    place = np.arange(len(order)) - starts[number]
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
    return Segments(
        pieces,
        index=np.append(index, order[~here]),
        padding=np.append(padding, np.zeros(np.count_nonzero(~here), bool)),
        slot=np.append(np.repeat(used, length), used[number[~here]]),
    )


def shared_length(counts: np.ndarray) -> int:
    """The length of the segments that all slots have, with the least padding and the fewest products.

    Args:
        counts: [n] rows of each slot, at least 1.

    Returns:
        One of the counts; what a slot has above it is computed on its own.
    """
    lengths = np.unique(counts)[:, None]
    above = np.maximum(counts - lengths, 0)
    cost = lengths[:, 0] * len(counts) + above.sum(axis=1) + PIECE_COST * (above > 0).sum(axis=1)
    return int(lengths[cost.argmin(), 0])


class AdapterRows:
    """Which rows of a batch use which adapter; made anew when rows come or go, used for every step and layer between."""

    def __init__(self, stack: AdapterStack, slots: np.ndarray) -> None:
        """See `segment` for `slots`, which are the stack's as it is laid out now."""
        segments = segment(slots)
        scaling = np.array([adapter.scaling for adapter in stack.adapters], np.float32)[segments.slot]
        self._stack = stack
        self._pieces = segments.pieces
        self._rows = segments.index
        self._index = torch.from_numpy(segments.index).to(stack.device)
        self._weight = torch.from_numpy(np.where(segments.padding, 0, scaling)).to(stack.device)[:, None]
        self._targets = {1: self._index}

    def add(self, group: str, x: Tensor, y: Tensor) -> None:
        """Add the adapters' part of a group of layers to its output.

        Args:
            x: [rows, inputs], what the layers read.
            y: [rows, outputs], contiguous, changed in place.
        """
        weights = self._stack.weights(group)
        if weights is None:
            return
        _, blocks, rank, width = weights.b.shape
        low = self._products(x.index_select(0, self._index).float()[:, None], weights.a[:, None]).mul_(self._weight)
        parts = low.view(len(low), -1, rank)
        if parts.shape[1] < blocks:
            parts = parts.index_select(1, weights.layer)
        y.view(-1, width).index_add_(0, self._target(blocks), self._products(parts, weights.b).to(y.dtype))

    def _products(self, x: Tensor, weights: Tensor) -> Tensor:
        """Each gathered row times the matrices of its slot: [M, blocks, in] to [M * blocks, out], within a segment block after block."""
        blocks = x.shape[1]
        result = x.new_empty(len(x) * blocks, weights.shape[3])
        for piece in self._pieces:
            rows = x[piece.rows].view(piece.num_slots, piece.length, blocks, -1).transpose(1, 2).flatten(0, 1)
            out = result[piece.rows.start * blocks : piece.rows.stop * blocks].view(len(rows), piece.length, -1)
            torch.bmm(rows, weights[piece.slots].flatten(0, 1), out=out)
        return result

    def _target(self, blocks: int) -> Tensor:
        """[M * blocks] where the products of a group belong in its output, seen as [rows * blocks, width]."""
        if blocks not in self._targets:
            first = [self._rows[piece.rows].reshape(-1, 1, piece.length) * blocks for piece in self._pieces]
            target = np.concatenate([(rows + np.arange(blocks)[:, None]).ravel() for rows in first])
            self._targets[blocks] = torch.from_numpy(target).to(self._index.device)
        return self._targets[blocks]
