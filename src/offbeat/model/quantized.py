"""Frozen linear layers whose weights are rounded to 8 or 4 bits (QLoRA, arXiv:2305.14314), under adapters that stay whole.

`bank_trainer` rounds the decoder's layers of a model that it has read. A layer makes its weights whole again for each product, forward and
backward, so that they are there one layer at a time. "int8" needs torch alone; "nf4", whose 16 numbers are equally frequent in a normal
distribution, is made and read by bitsandbytes.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.config.model import NF4_BLOCK
from offbeat.extras import QLORA, require
from offbeat.model.lora_targets import ALL_LINEAR, find_targets


class RoundedLinear(nn.Linear, ABC):
    """A frozen linear layer without its `weight`, which computes in `dtype`, the format of the layer that was rounded."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)  # without the room for whole weights that nn.Linear makes
        self.in_features, self.out_features, self.dtype = layer.in_features, layer.out_features, layer.weight.dtype
        self.bias = layer.bias

    @abstractmethod
    def plain(self) -> Tensor:
        """Return the numbers that the rounded ones stand for, [O, I] of `dtype`."""
        ...

    def forward(self, input: Tensor) -> Tensor:
        """Return input [..., I] times the matrix, plus the bias: [..., O]."""
        rows = _Product.apply(input.flatten(0, -2), self)
        return rows.view(*input.shape[:-1], -1)  # here, since adapters add to it in place


class FrozenInt8(RoundedLinear):
    """Whole numbers of 8 bits with a scale for each output."""

    ints: Tensor
    scales: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        wide = layer.weight.detach().float()
        scales = wide.abs().amax(1, keepdim=True) / 127
        self.register_buffer("ints", (wide / torch.where(scales > 0, scales, 1.0)).round_().to(torch.int8), persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def plain(self) -> Tensor:
        return (self.ints * self.scales).to(self.dtype)


class FrozenNf4(RoundedLinear):
    """Numbers of 4 bits, of 16 that a normal distribution has equally often, with a scale for every 64.

    They are kept as one long row: bitsandbytes 0.50 on CPUs reads matrices wrongly whose rows are not whole numbers of blocks.
    """

    packed: Tensor
    scales: Tensor
    levels: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        from bitsandbytes.functional import quantize_4bit  # noqa: PLC0415 - an extra, of which only this form has need

        packed, state = quantize_4bit(
            layer.weight.detach().reshape(1, -1), blocksize=NF4_BLOCK, quant_type="nf4", compress_statistics=False)
        for name, tensor in (("packed", packed), ("scales", state.absmax), ("levels", state.code)):
            self.register_buffer(name, tensor, persistent=False)

    def plain(self) -> Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit  # noqa: PLC0415 - as above

        shape = torch.Size((1, self.out_features * self.in_features))
        return dequantize_4bit(self.packed, QuantState(
            absmax=self.scales, shape=shape, code=self.levels, blocksize=NF4_BLOCK, quant_type="nf4", dtype=self.dtype,
        )).view(self.out_features, self.in_features)


_FORMS: dict[str, type[RoundedLinear]] = {"int8": FrozenInt8, "nf4": FrozenNf4}


def round_layers(model: nn.Module, form: str) -> None:
    """Put layers rounded to "int8" or "nf4" in the place of the linear layers of the decoder's layers; embeddings and head stay whole.

    Raises MissingExtraError for "nf4" without bitsandbytes, and ModelError if the model has no such layers.
    """
    if form == "nf4":
        require("qlora", QLORA, wanted_by="model.quantization = 'nf4'")
    for name, layer in find_targets(model, (ALL_LINEAR,)).items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, _FORMS[form](layer).requires_grad_(False))


class _Product(torch.autograd.Function):
    """x W^T + b with a W that exists while it is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: RoundedLinear) -> Tensor:
        """Return [N, O] from x [N, I], in autocast's format where it names one."""
        ctx.layer, ctx.dtype = layer, x.dtype
        return functional.linear(x, layer.plain(), layer.bias)

    @staticmethod
    def vjp(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        """Return the gradient of x [N, I]; the layer is frozen."""
        (grad,) = grads
        return (grad @ ctx.layer.plain().to(grad.dtype)).to(ctx.dtype), None
