"""Routes of a row's tokens to the adapters of an `AdapterBank`: one for all, one per block of equal length, or one per span.

The bank chooses the route of each row; its layers compute with the products of a `Route` and never know which kind it is.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from offbeat.model.uploads import upload


class Route(Protocol):
    """The adapter of each of R tokens, as products of rows x [R, I] with matrices stacked by slot, [N, I, O].

    `scaling` is the factor of each token's delta; a number, or [R, 1] float32.
    """

    scaling: float | Tensor

    def multiply(self, x: Tensor, weights: Tensor) -> Tensor:
        """Multiply each token's row x by its adapter's matrix; returns [R, O] in the dtype of x."""
        ...

    def add_product(self, rows: Tensor, x: Tensor, weights: Tensor) -> None:
        """Add the same product to rows [R, O], in place."""
        ...

    def add_outer(self, sums: Tensor, x: Tensor, g: Tensor) -> None:
        """Add to each adapter's sums [N, I, O] the products x' g over its tokens, with g [R, O]."""
        ...

    def subset(self, rows: Tensor) -> "Route":
        """Return the route of some of the tokens, [n] int64, ascending."""
        ...


class OneRoute:
    """A route on which all tokens use the adapter of one slot."""

    def __init__(self, slot: int, scaling: float) -> None:
        self._slot = slot
        self.scaling: float | Tensor = scaling

    def multiply(self, x: Tensor, weights: Tensor) -> Tensor:
        return x @ weights[self._slot].to(x.dtype)

    def add_product(self, rows: Tensor, x: Tensor, weights: Tensor) -> None:
        _add_product(rows, x, weights[self._slot].to(x.dtype))

    def add_outer(self, sums: Tensor, x: Tensor, g: Tensor) -> None:
        _add_product(sums[self._slot], x.mT, g)

    def subset(self, rows: Tensor) -> Route:  # noqa: ARG002
        """Return this route: each token has the one adapter."""
        return self


class _Spans:
    """A route of K spans of tokens, each with the adapter of its slot."""

    def __init__(self, slots: Sequence[int], lengths: Sequence[int], scaling: float | Tensor, *, device: torch.device) -> None:
        self._of_spans, self._lengths, self._device = list(slots), list(lengths), device
        self._slots = _selector(slots, device)
        self.scaling = scaling

    def subset(self, rows: Tensor) -> Route:
        """Return a route of shorter spans for the tokens `rows` [n] int64; see `Route.subset`."""
        counts = np.diff(np.searchsorted(rows.cpu().numpy(), np.cumsum([0, *self._lengths])))
        left = np.flatnonzero(counts)
        own = self.scaling[rows] if isinstance(self.scaling, Tensor) else self.scaling
        return SpanRoute([self._of_spans[span] for span in left.tolist()], counts[left].tolist(), own, device=self._device)


class EqualRoute(_Spans):
    """A route of spans of equal length: one batched product."""

    def multiply(self, x: Tensor, weights: Tensor) -> Tensor:
        return (self._blocks(x) @ weights[self._slots].to(x.dtype)).flatten(0, 1)

    def add_product(self, rows: Tensor, x: Tensor, weights: Tensor) -> None:
        _add_product(self._blocks(rows), self._blocks(x), weights[self._slots].to(x.dtype))

    def add_outer(self, sums: Tensor, x: Tensor, g: Tensor) -> None:
        x, g = self._blocks(x).mT, self._blocks(g)
        if isinstance(self._slots, slice):
            _add_product(sums[self._slots], x, g)
        else:
            _add_at(sums, self._slots, x @ g)

    def _blocks(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (len(self._of_spans), -1))


class SpanRoute(_Spans):
    """A route of spans of any length, one product each: measured several times faster than padding them to equal length."""

    def __init__(self, slots: Sequence[int], lengths: Sequence[int], scaling: float | Tensor, *, device: torch.device) -> None:
        super().__init__(slots, lengths, scaling, device=device)
        self._ends = upload(np.cumsum(lengths, dtype=np.int32), device)

    def multiply(self, x: Tensor, weights: Tensor) -> Tensor:
        own = weights[self._slots].to(x.dtype)
        if _is_aligned(x) and _is_aligned(own):
            return grouped_mm(x, own, offs=self._ends)
        return torch.cat([span @ matrix for span, matrix in zip(self._spans(x), own, strict=True)])

    def add_product(self, rows: Tensor, x: Tensor, weights: Tensor) -> None:
        own = weights[self._slots].to(x.dtype)
        for part, span, matrix in zip(self._spans(rows), self._spans(x), own.unbind(), strict=True):
            _add_product(part, span, matrix)

    def add_outer(self, sums: Tensor, x: Tensor, g: Tensor) -> None:
        x = x.mT
        if _is_aligned(x) and _is_aligned(g):
            products = grouped_mm(x, g, offs=self._ends)
        else:
            products = torch.stack([span_x @ span_g for span_x, span_g in zip(x.split(self._lengths, 1), self._spans(g), strict=True)])
        _add_at(sums, self._slots, products)

    def _spans(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(self._lengths)


def _selector(slots: Sequence[int], device: torch.device) -> slice | Tensor:
    """Return an index of the slots in a stack: a slice (a view) where they are adjacent, such as 2:5, else [N] int64 (a copy)."""
    run = range(slots[0], slots[0] + len(slots))
    return slice(run.start, run.stop) if list(slots) == list(run) else upload(np.array(slots, np.int64), device)


def _add_at(sums: Tensor, slots: slice | Tensor, products: Tensor) -> None:
    if isinstance(slots, slice):
        sums[slots].add_(products)
    else:
        sums.index_add_(0, slots, products.to(sums.dtype))


def _is_aligned(matrices: Tensor) -> bool:
    """Whether torch's grouped product takes these matrices [..., I, O] on the CPU, all spans in one call: rows of multiples of 16 bytes."""
    outer, inner = sorted(matrices.stride()[-2:], reverse=True)
    return matrices.is_cpu and inner == 1 and outer * matrices.element_size() % 16 == 0


def _add_product(sums: Tensor, x: Tensor, y: Tensor) -> None:
    """Compute sums [A, C] += x [A, B] y [B, C] for matrices or batches of them; the sums may have another dtype, and are rounded once."""
    if sums.dtype == x.dtype:
        (sums.addmm_ if x.ndim == 2 else sums.baddbmm_)(x, y)
    else:
        sums.add_(x @ y)
