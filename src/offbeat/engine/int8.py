"""Matrices of int8 weights, a quarter of the memory that a product has to read. Used by `forward_direct`, on CPUs.

Each output of a matrix has a scale, and so has each row of activations, the largest number in it: a sample's numbers do not depend on the
rest of its batch. Some inputs are much larger than others, which would leave few of the 8 bits to those; they are divided by a factor, and
their weights multiplied by it (SmoothQuant, arXiv:2211.10438, with an exponent of 1/2). Products are sums of whole numbers.

Kernels for CPUs without VNNI add pairs of products in 16 bits, where those of 8-bit activations overflow unnoticed. So each kernel is tried
before it is used (`find_kernel`), and activations have 7 bits where it overflows.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import ModelError

WIDE, NARROW = 127, 63
"""Largest activation in 8 and in 7 bits; two products of 127 and 2 * 63 + 1 fit into 16 bits."""

_PROBE = 64
"""Inputs and outputs of the products by which a kernel is tried."""


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """A quantised matrix: `ints` [O, I] int8, -127 to 127, and `scales` [O] float32, what 1 stands for in each row."""

    ints: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> "Int8Weight":
        """Quantise a matrix [O, I] of any float dtype. A row of zeros stays one; numbers that are not finite make their row's scale NaN."""
        wide = weight.float()
        scales = wide.abs().amax(1) / WIDE
        steps = torch.where(scales > 0, scales, 1.0)
        ints = (wide / steps[:, None]).round_().nan_to_num_(0).clamp_(-WIDE, WIDE).to(torch.int8)
        return cls(ints, scales * torch.where(scales.isfinite(), 1.0, torch.nan))

    @property
    def plain(self) -> Tensor:
        """[O, I] float32, the numbers that it stands for."""
        return self.ints.float() * self.scales[:, None]

    def stands_for(self, weight: Tensor) -> bool:
        """Whether only rounding lies between this and a finite `weight` [O, I]; computed in another way than `of`."""
        off = self.plain.sub_(weight).abs_().amax(1)
        most = self.scales * 0.501 + torch.finfo(torch.float32).tiny
        return bool((off <= most).all()) and torch.allclose(self.scales * WIDE, weight.abs().amax(1).float())


@dataclass(frozen=True)
class Kernel(ABC):
    """How this machine multiplies int8 matrices, with activations up to `top`, `WIDE` or `NARROW`."""

    top: int = WIDE

    @abstractmethod
    def pack(self, weight: Int8Weight) -> Any:
        """Bring a matrix into the kernel's layout. Raises RuntimeError where torch lacks it."""

    @abstractmethod
    def unpack(self, packed: Any) -> Int8Weight:
        """Read a matrix back from the memory that products read."""

    @abstractmethod
    def multiply(self, x: Tensor, packed: Any) -> Tensor:
        """Multiply x [N, I] float32, -1 to 1, rounded to `top` steps on each side of 0, by a packed matrix; returns [N, O] float32."""


class Fbgemm(Kernel):
    """FBGEMM, of torch's quantised operators on x86."""

    def pack(self, weight: Int8Weight) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions")  # there is no other way into this layout
            zeros = torch.zeros(len(weight.scales), dtype=torch.int64)
            tensor = torch._make_per_channel_quantized_tensor(weight.ints, weight.scales.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(tensor, None)

    def unpack(self, packed: Any) -> Int8Weight:
        tensor, _ = torch.ops.quantized.linear_unpack(packed)
        return Int8Weight(tensor.int_repr(), tensor.q_per_channel_scales().float())

    def multiply(self, x: Tensor, packed: Any) -> Tensor:
        return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, 1 / self.top, self.top + 1, packed)


class OneDnn(Kernel):
    """oneDNN, of torch's operators for compiled models."""

    def pack(self, weight: Int8Weight) -> Any:
        packed = torch.ops.onednn.qlinear_prepack(weight.ints, None)
        return packed, weight.scales, torch.zeros(len(weight.scales), dtype=torch.int32)

    def unpack(self, packed: Any) -> Int8Weight:
        ints, scales, _ = packed
        return Int8Weight(ints.to_dense().t(), scales)

    def multiply(self, x: Tensor, packed: Any) -> Tensor:
        ints, scales, zeros = packed
        whole = torch.add(x * self.top, self.top + 1.5).to(torch.uint8)  # rounds to the nearest, because all are positive
        return torch.ops.onednn.qlinear_pointwise(
            whole, 1 / self.top, self.top + 1, ints, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")


KERNELS: tuple[type[Kernel], ...] = (Fbgemm, OneDnn)
"""All kernels, the quickest first: at one row of SmolLM2's shapes, FBGEMM takes two thirds of oneDNN's time."""


class Int8Matrix:
    """Implements `matrix.Matrix` with int8 weights."""

    def __init__(self, weight: Tensor, factors: Tensor, kernel: Kernel) -> None:
        """Quantise and pack a matrix [O, I] of any float dtype; input i is divided by factors[i], [I] float32.

        Raises ModelError if what was packed is not the quantised matrix.
        """
        scaled = weight * factors
        self._packed = kernel.pack(Int8Weight.of(scaled))
        self._shares = factors.reciprocal()
        self._kernel = kernel
        if scaled.isfinite().all() and not self._read().stands_for(scaled):
            raise ModelError("int8 weights are not those that were to be quantised: torch's kernel or this machine's memory is at fault")

    @property
    def plain(self) -> Tensor:
        """[O, I] float32, the numbers that the ints stand for."""
        return self._read().plain * self._shares

    def digest(self) -> bytes:
        """Hash all numbers that products read. Not a sample of them as of published weights, because a small step changes few ints."""
        quantised = self._read()
        state = blake2b(str(tuple(quantised.ints.shape)).encode(), digest_size=32)
        for part in (quantised.ints, quantised.scales, self._shares):
            state.update(part.contiguous().view(-1).view(torch.uint8).numpy().data)
        return state.digest()

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        products, largest = self._multiply(x)
        return (products.mul_(largest) if bias is None else torch.addcmul(bias, products, largest)).to(x.dtype)

    def add(self, base: Tensor, x: Tensor) -> Tensor:
        products, largest = self._multiply(x)
        return torch.addcmul(base, products, largest).to(base.dtype)

    def _read(self) -> Int8Weight:
        return self._kernel.unpack(self._packed)

    def _multiply(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the products of rows divided by their largest number, [N, O], and the latter, [N, 1]; of zeros both are finite."""
        shared = x * self._shares
        largest = shared.abs().amax(1, keepdim=True)  # `vector_norm` is several times slower
        return self._kernel.multiply(shared / largest, self._packed), largest


class Int8Matrices:
    """Makes a model's matrices; the factors of their inputs are the same for all versions."""

    def __init__(self, ranges: Mapping[str, Tensor]) -> None:
        """`ranges` has the largest size seen of each of a matrix's inputs, [I], as of "0.qkv" or "head"; errors as of `find_kernel`."""
        self._ranges = ranges
        self._kernel = find_kernel()
        self._factors: dict[str, Tensor] = {}

    def make(self, name: str, weight: Tensor) -> Int8Matrix:
        """Quantise and pack the matrix of this name, [O, I] of any float dtype. Raises ModelError as `Int8Matrix`."""
        if name not in self._factors:
            self._factors[name] = input_factors(self._ranges[name], weight)
        return Int8Matrix(weight, self._factors[name], self._kernel)


def input_factors(ranges: Tensor, weight: Tensor) -> Tensor:
    """Return what inputs are divided by so that they and their weights are alike uneven, [I] float32.

    Args:
        ranges: [I], the largest size of each input; one that was hardly seen counts as a tenth of their mean.
        weight: [O, I].
    """
    inputs, outputs = ranges.float(), weight.float().abs().amax(0)
    found = (inputs.clamp_min(inputs.mean() / 10) / outputs.clamp_min(outputs.mean() / 10)).sqrt()
    return torch.where(found.isfinite() & (found > 0), found, 1.0)


@cache
def find_kernel() -> Kernel:
    """Return the quickest kernel that multiplies exactly here, with as many bits for activations as it can, or raise ModelError."""
    reasons = []
    for kernel in KERNELS:
        try:
            for top in (WIDE, NARROW):
                if is_exact(found := kernel(top)):
                    return found
            reasons.append(f"{kernel.__name__} computes wrong sums")
        except (RuntimeError, NotImplementedError, AttributeError) as exc:
            reasons.append(f"{kernel.__name__}: {str(exc).splitlines()[0]}")
    raise ModelError(f"this machine or its torch multiplies no int8 matrices ({'; '.join(reasons)}); use inference.quantization = \"none\"")


def is_exact(kernel: Kernel) -> bool:
    """Whether a kernel gives the right sums of the largest products there are, for one row and for several, and reads back its matrix."""
    ints = torch.full((_PROBE, _PROBE), WIDE, dtype=torch.int8)
    ints[1::2] = -WIDE
    weight = Int8Weight(ints, torch.full((_PROBE,), 1.0 / WIDE))
    packed = kernel.pack(weight)
    read = kernel.unpack(packed)
    if not (torch.equal(read.ints, ints) and torch.equal(read.scales, weight.scales)):
        return False
    wanted = ints.float().sum(1) / WIDE
    rows = (torch.ones(1, _PROBE), torch.cat([torch.ones(16, _PROBE), -torch.ones(16, _PROBE)]))
    return all(torch.allclose(kernel.multiply(x, packed), x[:, :1] * wanted, rtol=1e-5) for x in rows)
