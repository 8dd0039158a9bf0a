"""Ways in which an engine comes to compute with other weights than those that it was given. Used by drills on both sides of an engine.

Imports torch alone: the embedded engine's drills and vLLM's own processes (`vllm_faults`) read the same list.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

LOADING = (
    "stale", "half of the layers old", "one matrix old", "half of one matrix old", "one matrix of another model",
    "one norm of another model")
"""What goes wrong with the tensors on their way into a model of two layers. What else can go wrong depends on the engine."""
EXPERTS = ("stale", "one expert old", "two experts swapped", "router old", "half of a fused tensor old")
"""What goes wrong with those of a mixture of 8 experts in two layers, where each comes by itself."""
_MATRIX, _NORM = "model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"


def spoil(fault: str, new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What an engine with a fault of `LOADING` or `EXPERTS` computes with, of the weights that it was given and of those that it had."""
    if fault == "two experts swapped":
        one, two = (f"model.layers.1.mlp.experts.{number}." for number in (5, 6))
        return {name: new[name.replace(one, "*").replace(two, one).replace("*", two)] for name in new}
    return {name: _spoil(fault, name, tensor, old[name].to(tensor.dtype)) for name, tensor in new.items()}


def _spoil(fault: str, name: str, new: Tensor, old: Tensor) -> Tensor:
    match fault:
        case "stale":
            return old
        case "half of the layers old" if name.startswith("model.layers.1."):
            return old
        case "one matrix old" if name == _MATRIX:
            return old
        case "half of one matrix old" if name == _MATRIX:
            half = new.shape[1] // 2
            return torch.cat([new[:, :half], old[:, half:]], dim=1)
        case "one expert old" if name.startswith("model.layers.1.mlp.experts.5."):
            return old
        case "router old" if name == "model.layers.0.mlp.gate.weight":
            return old
        case "half of a fused tensor old" if name.startswith("model.layers.1.mlp.experts.") and ".up_proj." in name:
            return old
        case "one matrix of another model" if name == _MATRIX:
            return new.roll(1, dims=0)
        case "one norm of another model" if name == _NORM:
            return new.roll(1)
    return new
