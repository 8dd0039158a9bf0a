"""The layers of a model that adapters can train, by `model.lora.targets`; for banks, engines, rounding and the estimate of memory."""

import re
from collections.abc import Sequence

from torch import nn

from offbeat.errors import ModelError
from offbeat.model.fused_experts import ExpertLayer, check_experts, expert_layers, find_experts
from offbeat.model.images import is_language
from offbeat.model.layer_slices import is_divided

ALL_LINEAR = "all-linear"
EXPERTS = "experts"
"""The target that stands for the experts that a model holds in fused tensors."""
LAYER_KINDS = ("attn", "mlp", "unembed")
"""Kinds of layers that an adapter may train; see `layer_kind`. Only the output head is of the last kind, which no bank adapts today."""

_FEED_FORWARD = re.compile(r"\.(\w*mlp|feed_?forward|ffn|\w*experts?|\w*moe|fc\d)(\.|$)")


def find_targets(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """Find the linear layers of the decoder whose names end in one of `targets`; "all-linear" selects all of them, "experts" none.

    Raises ModelError if a target matches no layer; the message lists the layers.
    """
    if not (targets := [target for target in targets if target != EXPERTS]):
        return {}
    stacks = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    linear = {name: module for name, module in adaptable(model).items() if name.startswith(stacks)}
    if not linear:
        raise ModelError(f"{type(model).__name__} has no linear layers in its decoder's layers, which model.lora could adapt")
    if ALL_LINEAR in targets:
        return linear
    for target in targets:
        if not any(_is_named(name, target) for name in linear):
            there = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ModelError(f"model.lora.targets has {target!r}, which is not a linear layer of the decoder; use {there} or {ALL_LINEAR}")
    return {name: module for name, module in linear.items() if any(_is_named(name, target) for target in targets)}


def find_expert_layers(model: nn.Module, targets: Sequence[str]) -> list[ExpertLayer]:
    """Return the layers of a model's fused experts where "experts" is among the targets, else [].

    Raises ModelError as `check_experts`, and if a tensor group computes the experts together.
    """
    if EXPERTS not in targets:
        return []
    check_experts(model)
    if is_divided(model):
        raise ModelError(
            'ranks with train.parallel.tp divide experts, which have no adapters then; leave "experts" out of model.lora.targets, or set'
            " train.parallel.tp to 1")
    return [layer for name, module in find_experts(model).items() for layer in expert_layers(name, module)]


def adaptable(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a model's language part by name, except routers of experts, which some families derive from nn.Linear
    although they return more.
    """
    config = getattr(model, "config", None)
    return {name: module for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and "Router" not in type(module).__name__ and (config is None or is_language(config, name))}


def layer_kind(name: str) -> str:
    """Return "mlp" for linear layers of a decoder layer's feed-forward part, experts included, else "attn".

    For example "mlp" for "model.layers.0.mlp.up_proj", and "attn" for "model.layers.0.self_attn.q_proj".
    """
    return "mlp" if _FEED_FORWARD.search(name) else "attn"


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
