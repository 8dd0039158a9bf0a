"""Sums and maxima of an optimizer step, collected on the device and reduced over ranks at its end.

Nothing is read back from the device before `reduce`, so collecting never stalls its queue.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.dist.collectives import max_scalars, sum_scalars


class Tally:
    """Named float64 sums and maxima, from 0. Every rank must collect the same names; no values under a name are fine."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add the sum of each tensor."""
        for name, tensor in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + tensor.detach().sum(dtype=torch.float64)

    def raise_to(self, values: Mapping[str, Tensor]) -> None:
        """Raise each maximum to the largest element of its tensor; values are >= 0."""
        for name, tensor in values.items():
            largest = torch.cat([tensor.detach().double().flatten(), tensor.new_zeros(1, dtype=torch.float64)]).amax()
            self._maxima[name] = torch.maximum(self._maxima[name], largest) if name in self._maxima else largest

    def reduce(self, group: dist.ProcessGroup) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima over the ranks of `group`; collective."""
        return sum_scalars(_read(self._sums), group), max_scalars(_read(self._maxima), group)


def _read(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    return dict(zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True)) if tensors else {}
