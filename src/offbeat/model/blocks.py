"""Recomputing the activations of decoder layers in the backward pass, and compiling the layers, for a model in training.

`load_policy` lets activations be computed again; layers are compiled when a strategy has distributed the model.
"""

import sys
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AttentionInterface, PreTrainedModel

from offbeat.config.train import Recompute
from offbeat.model.attention import PACKED, packed_attention
from offbeat.model.images import is_language

_KEPT_OPERATIONS = frozenset({
    "aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention", "torch_attn::_varlen_attn"})
"""Operations whose results are kept by "selective": the expensive ones. Norms, activations and rotations are computed again."""


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers that the model's family, or that of a model within it, names as its blocks."""
    types = {name for module in model.modules() if isinstance(module, PreTrainedModel) for name in module._no_split_modules or ()}
    return [module for module in model.modules() if type(module).__name__ in types]


def language_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return `decoder_layers` without those of a vision tower."""
    blocks = set(decoder_layers(model))
    return [module for name, module in model.named_modules() if module in blocks and is_language(model.config, name)]


def checkpoint_activations(model: PreTrainedModel, recompute: Recompute) -> None:
    """Compute activations again in backward passes.

    Only the modules that do so are put in training mode, which they need: in that mode routers of some families choose experts at random or
    jitter their inputs, which no engine does, and differently when activations are computed again.
    """
    if recompute == "off":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        # FSDP2 marks its work for profilers where a part of a layer is in shards of its own, and not as often in a backward pass.
        SAC_IGNORED_OPS.update(
            getattr(torch.ops.profiler, name).default for name in ("_record_function_enter_new", "_record_function_exit"))
        SAC_IGNORED_OPS.add(torch.ops.profiler._record_function_exit._RecordFunction)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_or_recompute)
    model.gradient_checkpointing_enable(options)
    for module in model.modules():
        module.training = getattr(module, "gradient_checkpointing", False)


def compile_layers(model: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compile each decoder layer at its first call, for rows of any length; attention stays as it is, between two compiled parts."""
    AttentionInterface.register(PACKED, _uncompiled_attention())
    round_rotations(layers := decoder_layers(model))
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)


def round_rotations(layers: list[nn.Module]) -> None:
    """Let transformers' rotary positions of these layers give queries and keys in autocast's format, to which attention rounds them anyway.

    In a compiled layer they are written in it then, and need no cast of their own.
    """
    for file in {sys.modules[type(part).__module__] for layer in layers for part in layer.modules()}:
        rotate = vars(file).get("apply_rotary_pos_emb")
        if rotate is not None and rotate not in _rounding:
            vars(file)["apply_rotary_pos_emb"] = rounding = _rounded(rotate)
            _rounding.add(rounding)


def _rounded(rotate: Any) -> Callable[..., tuple[Tensor, ...]]:
    @wraps(rotate)
    def rounded(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        rotated = rotate(*args, **kwargs)
        kind = args[0].device.type if args else "meta"
        if isinstance(rotated, tuple) and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return tuple(each.to(torch.get_autocast_dtype(kind)) for each in rotated)
        return rotated

    return rounded


_rounding = set[Callable[..., tuple[Tensor, ...]]]()
"""What `round_rotations` has put in place."""


@cache
def _uncompiled_attention() -> Any:
    """Return attention that the compiler leaves alone: it follows a plan that differs for every row."""
    return torch.compiler.disable(packed_attention)  # not at import: it loads the compiler, which takes seconds


def _keep_or_recompute(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    kept = operation._schema.name in _KEPT_OPERATIONS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
