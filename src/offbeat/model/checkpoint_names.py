"""Translates weight names between a model's modules and the published checkpoints of its family.

When transformers loads a checkpoint, it fuses the experts of a layer into one tensor and renames some layers; engines such as vLLM expect
the names of the checkpoint. Called where weights are published and fingerprinted, and by an engine that runs the same modules.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_converters,
    apply_renamings,
    dot_natural_key,
)


def published_names(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename a model's state, or a part of it, as in a checkpoint; one weight may become several, as views where possible.

    Args:
        model: a model from `from_pretrained`, which remembers how its checkpoint was named.
        state: tensors by the names of `model.state_dict()`, such as "lm_head.weight" [V, H]. Weights that a checkpoint fuses into one must
            all be present.
    """
    reversed_transforms = [transform.reverse_transform() for transform in reversed(_transforms(model))]
    converters, renamings = _by_kind(reversed_transforms)
    if not reversed_transforms:
        return dict(state)
    return {apply_renamings(name, renamings): tensor for name, tensor in _converted(model, state.items(), converters, renamings=[])}


def published_together(model: PreTrainedModel, names: Iterable[str]) -> list[list[str]]:
    """Group names of `model.state_dict()` that `published_names` fuses into one weight; each name is in one group."""
    converters, _ = _by_kind([transform.reverse_transform() for transform in reversed(_transforms(model))])
    groups: dict[str, list[str]] = {}
    for name in names:
        target, _ = apply_converters(name, converters)
        groups.setdefault(target, []).append(name)
    return list(groups.values())


def module_names(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Invert `published_names`; a weight that already has a module's name keeps it."""
    transforms = _transforms(model)
    if not transforms:
        return dict(state)
    own = dict(model.named_parameters())
    kept = {name: tensor for name, tensor in state.items() if name in own}
    converters, renamings = _by_kind(transforms)
    others = [(name, tensor) for name, tensor in state.items() if name not in own]
    return kept | dict(_converted(model, others, converters, renamings=renamings))


def _converted(
    model: PreTrainedModel, items: Iterable[tuple[str, Tensor]], converters: list[WeightConverter], *, renamings: list[WeightRenaming],
) -> Iterable[tuple[str, Tensor]]:
    """Rename each weight, then fuse it with others or split it with the converter that matches its name."""
    gathered: dict[str, WeightConverter] = {}
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for name, tensor in sorted(items, key=lambda item: dot_natural_key(item[0])):
        source = apply_renamings(name, renamings)
        target, pattern = apply_converters(source, converters)
        if pattern is None:
            yield source, tensor
        else:
            gathered.setdefault(target, deepcopy(of_pattern[pattern])).add_tensor(target, source, pattern, tensor)  # pyright: ignore[reportArgumentType]
    for target, converter in gathered.items():
        for name, tensor in converter.convert(target, model=model, config=model.config).items():
            yield name, tensor[0] if isinstance(tensor, list) else tensor


def _transforms(model: PreTrainedModel) -> list[WeightTransform]:
    """Return how checkpoints of this family are loaded. A prefix that only some checkpoints have is included if this model's had it."""
    used = getattr(model, "_weight_conversions", None) or []
    known = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in known if not isinstance(transform, PrefixChange)] + [
        transform for transform in used if isinstance(transform, PrefixChange)]


def _by_kind(transforms: list[WeightTransform]) -> tuple[list[WeightConverter], list[WeightRenaming]]:
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    return converters, [transform for transform in transforms if isinstance(transform, WeightRenaming)]
