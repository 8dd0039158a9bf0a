"""Weights of a linear layer in the layout that this machine multiplies fastest. Used by `forward_direct`."""

import platform
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

PACK_FROM = 1 << 18
"""Smallest number of elements for which packing pays; below it a call costs more than its product."""

_IS_ARM = platform.machine().lower() in ("aarch64", "arm64")

_PACK_ROWS = 64
"""Number of rows of x that a packed matrix is laid out for; other numbers are about as fast."""


HEAD = "head"
"""Name of the output head among a model's matrices."""


class Matrix(Protocol):
    """A matrix [out, in]; immutable."""

    @property
    def plain(self) -> Tensor:
        """The matrix [O, I], such as [V, H] of a head."""
        ...

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [N, I] by the matrix, and add the bias [O]; returns [N, O]."""
        ...

    def add(self, base: Tensor, x: Tensor) -> Tensor:
        """Return `base` [N, O] plus the product with x [N, I], rounded once."""
        ...


class ByColumns:
    """A matrix stored with contiguous columns: on a CPU, products with few rows run up to twice as fast."""

    def __init__(self, matrix: Tensor) -> None:
        self.plain = matrix.t().contiguous().t()

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.plain, bias)

    def add(self, base: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(base, x, self.plain.t())


class ByRows(ByColumns):
    """A matrix stored as it is, sharing memory: for a large matrix of many rows this is just as fast."""

    def __init__(self, matrix: Tensor) -> None:
        self.plain = matrix


class Packed:
    """A matrix in oneDNN's own layout: in float32 up to twice as fast as MKL, in bfloat16 a fifth faster than converting at each call."""

    def __init__(self, matrix: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), _PACK_ROWS)

    @property
    def plain(self) -> Tensor:
        """[O, I], unpacked into new memory."""
        return self._packed.to_dense()

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")

    def add(self, base: Tensor, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, base, self._packed, None, "add")


class Matrices(Protocol):
    """Chooses the form of a model's matrices."""

    def make(self, name: str, weight: Tensor) -> Matrix:
        """Return the matrix [O, I] of a name, such as "0.qkv", or "head" for the output head [V, H]."""
        ...


class FloatMatrices:
    """Keeps all numbers, in the layouts that are fastest."""

    def make(self, name: str, weight: Tensor) -> Matrix:
        return head_matrix(weight) if name == HEAD else matrix(weight)


def matrix(weight: Tensor) -> Matrix:
    """Return the fastest layout for a layer within the model; `weight` is [O, I] of any float dtype."""
    return Packed(weight) if _packs(weight) else ByColumns(weight)


def head_matrix(weight: Tensor) -> Matrix:
    """Return the fastest layout for the output head [V, H], which may share memory with the embedding."""
    return Packed(weight) if _packs(weight) else ByRows(weight)


def _packs(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.numel() >= PACK_FROM and packs_in(weight.dtype)


def packs_in(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs matrices of this format here: bfloat16 needs AVX-512 on x86, and bf16 instructions on ARM."""
    if not torch.backends.mkldnn.is_available() or (_IS_ARM and not torch.ops.mkldnn._is_mkldnn_acl_supported()):
        return False  # on ARM, oneDNN is quick by the Arm Compute Library alone
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
