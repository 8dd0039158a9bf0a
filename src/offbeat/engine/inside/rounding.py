"""The rounding of weights to 8 or 4 bits in vLLM's layers, computed apart from its kernels. Needs torch alone.

`vllm_quantized` rounds weights by it as they are loaded, and `vllm_readback` compares the kernels' weights with its numbers. To floats of
8 bits vLLM itself rounds; there, these are only the expected numbers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Inputs that share a scale in 4 bits; the smallest group that vLLM's kernels take, and all of them take it."""
FORMS = ("int8", "int4", "fp8")
"""Forms of weights: whole numbers of 8 and of 4 bits, and floats of 8 bits (e4m3)."""


@dataclass(frozen=True, eq=False)
class Rounded:
    """A rounded matrix.

    Attributes:
        numbers: [O, I] int8, or float8_e4m3fn for "fp8".
        scales: [O, G], what 1 stands for in each of G equal parts of a row.
    """

    numbers: Tensor
    scales: Tensor

    def columns(self, columns: Tensor) -> Tensor:
        """Return what these columns, [K], stand for: [O, K] float32."""
        group = self.numbers.shape[1] // self.scales.shape[1]
        return self.numbers[:, columns].float() * self.scales[:, columns // group].float()

    def signed_sums(self, signs: Tensor) -> Tensor:
        """Return the sum of each row with these signs, [K, I]: [O, K] float64."""
        plain = self.numbers.double() * self.scales.double().repeat_interleave(self.numbers.shape[1] // self.scales.shape[1], dim=1)
        return plain @ signs.double().T


def round_matrix(form: str, rows: Tensor, *, first: int = 0, width: int = 0) -> Rounded:
    """Round a layer's share of a matrix.

    Args:
        form: one of `FORMS`.
        rows: [O, I] of any float dtype, all inputs of the outputs that the layer has.
        first, width: the inputs that the layer has; all of them by default. Only in 8-bit floats do others count for the scales.
    """
    own = rows[:, first : first + width] if width else rows
    if form == "int4":
        return _int4(own)
    if form == "int8":
        wide = own.float()
        scales = wide.abs().amax(1, keepdim=True) / 127
        return Rounded((wide / torch.where(scales > 0, scales, 1.0)).round_().clamp_(-127, 127).to(torch.int8), scales)
    most = torch.tensor(torch.finfo(torch.float8_e4m3fn).max, dtype=torch.float32)
    scales = (rows.abs().amax(1, keepdim=True).float() / most).clamp_min(1.0 / (most * 512))
    return Rounded((own / scales).clamp_(-most, most).to(torch.float8_e4m3fn), scales)


def _int4(weight: Tensor) -> Rounded:
    """Round to whole numbers from -8 to 7. The largest number of a group becomes -8, so that a scale may be negative; scales have the
    weight's dtype, as kernels want them.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = (largest / -8).to(weight.dtype)
    numbers = (groups / torch.where(scales != 0, scales.float(), 1.0)).round_().clamp_(-8, 7)
    return Rounded(numbers.flatten(1).to(torch.int8), scales.squeeze(2))
