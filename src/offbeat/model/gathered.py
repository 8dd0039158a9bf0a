"""A divided model's whole twin, which computes with weights that ranks gather from their parts, one layer's at a time.

Called by `parallel`, which compares a model with its twin. Besides its own parts, a rank never holds more than the weights of a layer, or
of the embeddings.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from offbeat.model.blocks import decoder_layers
from offbeat.model.images import language_attention
from offbeat.model.values import ValueHead

_Places = list[tuple[nn.Module, str, str]]
"""Modules of a twin, their parameters' names, and the names of the same parameters in the divided model."""


def whole_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model for forward passes without gradient, which are collective over the ranks that hold parts of `model`.

    It gives the outputs of the undivided `model`. A value head gives zeros, as it is never divided.
    """
    if isinstance(model, FSDPModule):
        model.reshard()  # after a forward pass the root's parameters are whole, in the format that it computes in
    kind = next(each for each in type(model).__mro__ if not each.__name__.startswith("FSDP"))
    with torch.device("meta"):
        twin: PreTrainedModel = kind(deepcopy(model.config)).to(model.dtype).eval()
    twin.set_attn_implementation(language_attention(model.config, model.config._attn_implementation or "eager"))
    if isinstance(head := model.get_output_embeddings(), ValueHead):
        twin.set_output_embeddings(ValueHead(head.in_features))
    for name, module in twin.named_modules():
        module._buffers.update(model.get_submodule(name)._buffers)
    layers = decoder_layers(twin)
    within = {id(module) for layer in layers for module in layer.modules()}
    for name, module in twin.named_modules():
        places = _places(module, name, deep=module in layers)
        if places and (module in layers or id(module) not in within) and not isinstance(module, ValueHead):
            module.register_forward_pre_hook(partial(_fill, model.get_parameter, places))
            module.register_forward_hook(partial(_empty, places), always_call=True)
    # Callers, and models within it, ask their first parameter for the device and the number format.
    placed = nn.Parameter(torch.empty(0, dtype=model.dtype, device=model.device), requires_grad=False)
    for module in [each for each in twin.modules() if isinstance(each, PreTrainedModel)]:
        module.register_parameter("placed", placed)
    return twin


def _places(module: nn.Module, name: str, *, deep: bool) -> _Places:
    inner = module.named_modules() if deep else [("", module)]
    return [
        (each, key, ".".join(part for part in (name, path, key) if part))
        for path, each in inner for key, parameter in each._parameters.items() if parameter is not None]


def _fill(parameter_of: Callable[[str], Tensor], places: _Places, *_: object) -> None:
    for module, key, name in places:
        part = parameter_of(name).detach()
        whole = part.full_tensor() if isinstance(part, DTensor) else part
        module._parameters[key] = nn.Parameter(whole, requires_grad=False)


def _empty(places: _Places, *_: object) -> None:
    for module, key, _name in places:
        held = module._parameters[key]
        module._parameters[key] = None if held is None else nn.Parameter(held.to("meta"), requires_grad=False)
