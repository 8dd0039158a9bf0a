"""The weights of the direct forward: one version of them, how they are read, and what proves a quantised one. Used by `forward_direct`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.engine.forward import bytes_of, checked_tensor
from offbeat.engine.matrix import HEAD, Matrix
from offbeat.model.fingerprint import digests

MATRICES = ("qkv", "out", "gate_up", "down")
"""The matrices of a layer; the one of layer 3 is named "3.qkv"."""


@dataclass(frozen=True, eq=False)
class Layer:
    """Weights of one decoder layer; fused matrices are stacked along their output dimension."""

    norm1: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    out: Matrix
    norm2: Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, eq=False)
class Origin:
    """Proof of a quantised version: what its matrices were made of, and what was made.

    Attributes:
        read: digest of each tensor as it was read, by its published name; see `model.fingerprint.digests`.
        made: digest of each quantised matrix, by its name, such as "0.qkv".
    """

    read: Mapping[str, bytes]
    made: Mapping[str, bytes]


@dataclass(frozen=True, eq=False)
class DirectWeights:
    """All weights of one version; immutable, so that a reader on another thread sees a consistent version.

    `origin` is None where the matrices have all numbers of the weights.
    """

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Matrix
    origin: Origin | None = None


class StateReader:
    """Reads tensors of a state; notes their digests where the numbers will not be kept."""

    def __init__(self, state: Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device, notes: bool) -> None:
        self.digests: dict[str, bytes] = {}
        self._state = state
        self._dtype = dtype
        self._device = device
        self._notes = notes

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in the engine's format, on its device; see `checked_tensor`."""
        tensor = checked_tensor(self._state, name, shape=shape, dtype=self._dtype, device=self._device)
        if self._notes:
            self.digests |= digests(bytes_of([(name, tensor)]))
        return tensor


class WatchedMatrix:
    """A matrix that notes the largest size of each of its inputs, [I] float32."""

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix
        self.largest = torch.zeros(())

    @property
    def plain(self) -> Tensor:
        return self._matrix.plain

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        self.largest = torch.maximum(self.largest, x.float().abs().amax(0))
        return self._matrix(x, bias)

    def add(self, base: Tensor, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.float().abs().amax(0))
        return self._matrix.add(base, x)


def matrices_of(weights: DirectWeights) -> Iterator[tuple[str, Matrix]]:
    """Yield all matrices with their names, such as "0.qkv"."""
    for i, layer in enumerate(weights.layers):
        for name in MATRICES:
            yield f"{i}.{name}", getattr(layer, name)
    yield HEAD, weights.head
