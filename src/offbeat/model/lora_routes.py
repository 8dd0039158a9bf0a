"""How the tokens of a row reach the adapters of an `AdapterBank`: one for all, one per block of equal length, one per span.

Chosen by the bank for each row; its layers compute with the two products of a `Route` and never know which it is.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Route(Protocol):
    """Which adapter each of R tokens uses, as products of rows x [R, i] with matrices that stand in one slot each, as [N, i, o].

    Attributes:
        scaling: what a token's delta is multiplied by; a number, or [R, 1].
    """

    scaling: float | Tensor

    def multiply(self, x: Tensor, weights: Tensor) -> Tensor:
        """[R, o], each token's x times its adapter's weights, in the number format of x."""
        ...

    def add_product(self, rows: Tensor, x: Tensor, weights: Tensor) -> None:
        """Add the same to rows [R, o]."""
        ...

    def add_outer(self, sums: Tensor, x: Tensor, g: Tensor) -> None:
        """Add to each adapter's sums [N, i, o] the products x' g over its tokens, of g [R, o]."""
        ...


class OneRoute:
    """All tokens use the adapter of one slot."""

    def __init__(self, slot: int, scaling: float) -> None:
        self._slot = slot
        self.scaling: float | Tensor = scaling

    def multiply(self, x: Tensor, weights: Tensor) -> Tensor:
        """See `Route.multiply`."""
        return x @ weights[self._slot].to(x.dtype)

    def add_product(self, rows: Tensor, x: Tensor, weights: Tensor) -> None:
        """See `Route.add_product`."""
        _add_product(rows, x, weights[self._slot].to(x.dtype))

    def add_outer(self, sums: Tensor, x: Tensor, g: Tensor) -> None:
        """See `Route.add_outer`."""
        _add_product(sums[self._slot], x.mT, g)


class EqualRoute:
    """K spans of tokens, all of one length, each with the adapter of its slot: one batched product."""

    def __init__(self, slots: Sequence[int], scaling: Tensor) -> None:
        self._num = len(slots)
        # Neighbouring slots are a view of the bank; others are copied out, and their sums added back.
        are_neighbours = list(slots) == list(range(slots[0], slots[0] + self._num))
        self._slots = slice(slots[0], slots[0] + self._num) if are_neighbours else torch.tensor(slots, device=scaling.device)
        self.scaling: float | Tensor = scaling

    def multiply(self, x: Tensor, weights: Tensor) -> Tensor:
        """See `Route.multiply`."""
        return (self._blocks(x) @ weights[self._slots].to(x.dtype)).flatten(0, 1)

    def add_product(self, rows: Tensor, x: Tensor, weights: Tensor) -> None:
        """See `Route.add_product`."""
        _add_product(self._blocks(rows), self._blocks(x), weights[self._slots].to(x.dtype))

    def add_outer(self, sums: Tensor, x: Tensor, g: Tensor) -> None:
        """See `Route.add_outer`."""
        x, g = self._blocks(x).mT, self._blocks(g)
        if isinstance(self._slots, slice):
            _add_product(sums[self._slots], x, g)
        else:
            sums.index_add_(0, self._slots, (x @ g).to(sums.dtype))

    def _blocks(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (self._num, -1))


class SpanRoute:
    """Spans of tokens of any lengths, one product each: measured several times faster than padding them to one length."""

    def __init__(self, slots: Sequence[int], lengths: Sequence[int], scaling: Tensor) -> None:
        self._slots, self._lengths = list(slots), list(lengths)
        self.scaling: float | Tensor = scaling

    def multiply(self, x: Tensor, weights: Tensor) -> Tensor:
        """See `Route.multiply`."""
        result = x.new_empty(len(x), weights.shape[2])
        for slot, span, part in zip(self._slots, x.split(self._lengths), result.split(self._lengths), strict=True):
            torch.mm(span, weights[slot].to(x.dtype), out=part)
        return result

    def add_product(self, rows: Tensor, x: Tensor, weights: Tensor) -> None:
        """See `Route.add_product`."""
        for slot, part, span in zip(self._slots, rows.split(self._lengths), x.split(self._lengths), strict=True):
            _add_product(part, span, weights[slot].to(x.dtype))

    def add_outer(self, sums: Tensor, x: Tensor, g: Tensor) -> None:
        """See `Route.add_outer`."""
        for slot, span_x, span_g in zip(self._slots, x.split(self._lengths), g.split(self._lengths), strict=True):
            _add_product(sums[slot], span_x.mT, span_g)


def _add_product(sums: Tensor, x: Tensor, y: Tensor) -> None:
    """sums += x y, of matrices or of batches of them; the sums may be in another format, and are rounded once."""
    if sums.dtype == x.dtype:
        (sums.addmm_ if x.ndim == 2 else sums.baddbmm_)(x, y)
    else:
        sums.add_(x @ y)
