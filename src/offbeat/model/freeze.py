"""Parts of a model that are not trained, by `train.freeze`: those of a model that reads images, and the routers of a mixture of experts."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from offbeat.errors import ModelError
from offbeat.model.images import family_of
from offbeat.model.route_replay import find_routers

_IMAGE_PARTS = ("language", "tower", "projector")


def freeze(model: PreTrainedModel, parts: Sequence[str]) -> None:
    """Train nothing of some parts: "language", "tower", "projector", "router". Raises ModelError if there are no such, or no others."""
    if not parts:
        return
    if "router" in parts:
        _freeze_routers(model)
    if any(part in _IMAGE_PARTS for part in parts):
        _freeze_image_parts(model, parts)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("train.freeze names all parts of the model; leave one out, which is trained")


def _freeze_routers(model: nn.Module) -> None:
    routers = find_routers(model)
    if not routers:
        raise ModelError(
            f'train.freeze names "router", and {type(model).__name__} has no routers of experts that are found as such; leave it out')
    for router in routers:
        router.requires_grad_(False)


def _freeze_image_parts(model: PreTrainedModel, parts: Sequence[str]) -> None:
    family = family_of(model.config)
    if family is None:
        raise ModelError(f"train.freeze names parts of a model that reads images, and {type(model).__name__} is none; leave it out")
    for name, parameter in model.named_parameters():
        part = "projector" if name.startswith(family.projector) else "tower" if name.startswith(family.tower) else "language"
        if part in parts:
            parameter.requires_grad_(False)
