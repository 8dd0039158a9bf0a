"""Experts that transformers fuses into one tensor, seen as linear layers of their own; for adapters beside them.

A fused parameter such as gate_up_proj [E, O, I] is E linear layers here, such as "model.layers.0.mlp.experts.gate_up_proj.3", so that
adapters, their banks and stacks treat an expert as any other layer. `adapt` replaces the forward pass of such a module where an adapter
takes part: it computes expert by expert, as transformers' eager code does, and hands each product over. Used by trainer and engine.
"""

import re
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers.integrations import moe

from offbeat.errors import ModelError

PARTS = ("gate_up_proj", "down_proj")
"""A module's fused parameters, in the order in which they are applied and registered."""

_NAME = re.compile(r"(?P<module>.+)\.(?P<part>gate_up_proj|down_proj)\.(?P<expert>\d+)")
_PLAIN = {"is_concatenated": True, "is_transposed": False, "has_gate": True, "has_bias": False, "has_post_expert_norm": False}
"""Transformers' description of experts that compute down(act(gate(x)) * up(x)), with the rows of gate before those of up."""


@dataclass(frozen=True)
class ExpertLayer:
    """One linear layer of one expert.

    Attributes:
        name: such as "model.layers.0.mlp.experts.gate_up_proj.3".
        num_in, num_out: I and O of its matrix [O, I].
    """

    name: str
    num_in: int
    num_out: int


class ExpertAdapters(Protocol):
    """The adapters beside the experts of one module."""

    def take_part(self) -> bool:
        """Whether they do in this forward pass."""
        ...

    def add(self, part: str, expert: int, x: Tensor, output: Tensor, rows: Tensor) -> Tensor:
        """Return the output of one linear layer of one expert plus the adapters' own.

        Args:
            part: one of `PARTS`.
            x: [n, I], the layer's input.
            output: [n, O], which may be changed.
            rows: [n] int64, ascending, the tokens of the forward pass that they belong to.
        """
        ...


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model that hold fused experts of the plain form, by name."""
    return {name: module for name, module in model.named_modules() if _is_plain(module)}


def has_other_experts(model: nn.Module) -> bool:
    """Whether some fused experts of a model are of another form."""
    return any(_is_fused(module) and not _is_plain(module) for module in model.modules())


def check_experts(model: nn.Module) -> None:
    """Check that all fused experts of a model can be adapted. Raises ModelError if it has none, or some of another form."""
    name, plain = type(model).__name__, find_experts(model)
    if has_other_experts(model):
        raise ModelError(f'{name} has experts of a form that is not adapted; leave "experts" out of model.lora.targets')
    if not plain:
        raise ModelError(f'{name} has no experts that are fused; leave "experts" out of model.lora.targets, or use all-linear')


def expert_layers(name: str, module: Any) -> list[ExpertLayer]:
    """Return the layers of a module of `find_experts`, those of the first part before those of the second."""
    return [ExpertLayer(f"{name}.{part}.{expert}", *reversed(getattr(module, part).shape[1:]))
            for part in PARTS for expert in range(getattr(module, part).shape[0])]


def split_name(layer: str) -> tuple[str, str, int] | None:
    """Return module, part and expert of a layer's name; None for one that is no expert's."""
    match = _NAME.fullmatch(layer)
    return None if match is None else (match["module"], match["part"], int(match["expert"]))


def adapt(module: Any, adapters: ExpertAdapters) -> None:
    """Let adapters take part in a module's forward passes; those in which they do not are as before."""
    plain = module.forward

    @wraps(plain)
    def forward(hidden_TH: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not adapters.take_part():
            return plain(hidden_TH, top_k_index, top_k_weights)
        return _by_expert(module, hidden_TH, top_k_index, top_k_weights, adapters)

    module.forward = torch.compiler.disable(forward)


def _by_expert(module: Any, hidden_TH: Tensor, top_k_index: Tensor, top_k_weights: Tensor, adapters: ExpertAdapters) -> Tensor:
    """Compute expert by expert; experts [T, k] and their weights [T, k] are as the router gives them. Returns [T, H]."""
    experts, num_experts = top_k_index.flatten(), module.gate_up_proj.shape[0]
    order = torch.argsort(experts, stable=True)  # so that an expert's tokens are ascending
    counts = torch.bincount(experts, minlength=num_experts).tolist()
    weights, result_TH = top_k_weights.flatten()[order, None].split(counts), torch.zeros_like(hidden_TH)
    for expert, rows in enumerate((order // top_k_index.shape[1]).split(counts)):
        if not len(rows):
            continue
        x = hidden_TH[rows]
        gate_up = adapters.add("gate_up_proj", expert, x, F.linear(x, module.gate_up_proj[expert]), rows)
        inner = module._apply_gate(gate_up)
        output = adapters.add("down_proj", expert, inner, F.linear(inner, module.down_proj[expert]), rows)
        result_TH.index_add_(0, rows, (output * weights[expert]).to(result_TH.dtype))
    return result_TH


def _is_fused(module: Any) -> bool:
    return all(isinstance(tensor := getattr(module, part, None), nn.Parameter) and tensor.ndim == 3 for part in PARTS)


def _is_plain(module: Any) -> bool:
    has_plain_gate = getattr(type(module), "_apply_gate", None) is moe._default_apply_gate
    return _is_fused(module) and has_plain_gate and all(getattr(module, name, None) is value for name, value in _PLAIN.items())
