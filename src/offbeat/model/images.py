"""Images in a model's forward pass: its tower's features in the places of placeholders, and positions of several dimensions.

Called by `logprobs` in training and by the engine's `forward_hf`, so that both compute the same. Pixels come from the run's `ImageStore` by
the ids in the tokens; a model without one refuses such ids. `data.image_reader.FAMILIES` names the families.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.data.image_reader import FAMILIES
from offbeat.data.image_store import FIRST_ID, ImageStore, StoredImage, find_images, image_positions, is_image
from offbeat.data.packing import PackedRow
from offbeat.errors import ModelError
from offbeat.model.head import local_part
from offbeat.model.uploads import upload


@dataclass(frozen=True)
class ImageFamily:
    """Where the parts of a family's models are.

    Attributes:
        tower: prefixes of the names of the vision tower's modules.
        projector: prefixes of the modules and parameters that take the tower's states to the language part.
        joins: the dimension of each input along which several images run together.
        language: prefixes of the language part's modules.
        grid: whether the positions of its placeholders count rows and columns.
        deep: whether the tower has features for the first layers of the language part, too (DeepStack, arXiv:2406.04334).
        sees_whole: whether the placeholders of an image attend to all of them, also to later ones.
    """

    tower: tuple[str, ...]
    projector: tuple[str, ...]
    joins: Mapping[str, int]
    language: tuple[str, ...] = ("model.language_model.", "lm_head.")
    grid: bool = False
    deep: bool = False
    sees_whole: bool = False


_TILES = ImageFamily(
    ("model.vision_model.",), ("model.connector.",), {"pixel_values": 1, "pixel_attention_mask": 1}, ("model.text_model.", "lm_head."))
_PATCHES = ImageFamily(("model.visual.",), ("model.visual.merger.",), {"pixel_values": 0, "image_grid_thw": 0}, grid=True)
_DEEP = replace(_PATCHES, projector=(*_PATCHES.projector, "model.visual.deepstack_merger_list."), deep=True)
_TOWER, _PROJECTOR = ("model.vision_tower.",), ("model.multi_modal_projector.", "model.image_newline.")

IMAGE_FAMILIES = {
    "gemma3": ImageFamily(_TOWER, _PROJECTOR, {"pixel_values": 0}, sees_whole=True),
    "idefics3": _TILES,
    "internvl": ImageFamily(_TOWER, _PROJECTOR, {"pixel_values": 0}),
    "llava_onevision": ImageFamily(_TOWER, _PROJECTOR, {"pixel_values": 0, "image_sizes": 0}),
    "qwen2_5_vl": _PATCHES,
    "qwen2_vl": _PATCHES,
    "qwen3_vl": _DEEP,
    "qwen3_vl_moe": _DEEP,
    "smolvlm": _TILES}

assert set(IMAGE_FAMILIES) == set(FAMILIES), "what is read can be computed"


@dataclass(eq=False)
class ModelImages:
    """The images of one model.

    Attributes:
        num_encoded: number of images that its tower has encoded so far.
        touches_all: whether each training row gives every trained weight a gradient, if only of zeros; ranks that share gradients need it.
    """

    store: ImageStore
    family: ImageFamily
    num_encoded: int = 0
    touches_all: bool = False
    _features: dict[int, Tensor] = field(default_factory=dict)

    def features(self, model: Any, images: Sequence[StoredImage]) -> dict[int, Tensor]:
        """Return the features of some images by id, [P, D * H] each, one row for each placeholder; equal images run once.

        D is 1, or in a `deep` family 1 and the number of layers that have features of their own, which stand behind the first H.

        Raises:
            ModelError: the model gives another number of them.
        """
        distinct = list({image.id: image for image in images}.values())
        found: dict[int, Tensor] = {}
        for batch in _of_like_shapes(distinct, self.family):
            device = next(model.parameters()).device
            inputs = {
                name: torch.from_numpy(np.concatenate([image.arrays[name] for image in batch], axis=axis)).to(device)
                for name, axis in self.family.joins.items() if name in batch[0].arrays}
            with _computing_locally(model.model):
                made = model.get_image_features(**inputs, return_dict=True)
            layers = [made.pooler_output, *(made.deepstack_features if self.family.deep else ())]
            rows = torch.cat([torch.cat([part.flatten(0, -2) for part in parts]) for parts in layers], dim=-1)
            self.num_encoded += len(batch)
            counts = [image.num_placeholders for image in batch]
            if len(rows) != sum(counts):
                raise ModelError(
                    f"{type(model).__name__} gives {len(rows)} features for images of {sum(counts)} placeholders; its processor's files do"
                    " not belong to its config.json")
            found |= dict(zip((image.id for image in batch), rows.split(counts), strict=True))
        return found

    def kept_features(self, model: Any, images: Sequence[StoredImage]) -> dict[int, Tensor]:
        """Return `features` without gradient, and keep them until `forget`, for the requests of a group or a chat."""
        missing = [image for image in images if image.id not in self._features]
        if missing:
            if sum(map(len, self._features.values())) > _KEPT_FEATURES:
                self.forget()
            self._features |= self.features(model, missing)
        return {image.id: self._features[image.id] for image in images} if all(image.id in self._features for image in images) else (
            self.features(model, images))

    def forget(self) -> None:
        """Forget kept features, because the tower's weights are new."""
        self._features.clear()


_KEPT_FEATURES = 1 << 16
"""Placeholders whose features an engine keeps."""

_given: "WeakKeyDictionary[nn.Module, ModelImages]" = WeakKeyDictionary()


def family_of(config: Any) -> ImageFamily | None:
    """Return the family of a model's configuration; None if images are not read for it."""
    return IMAGE_FAMILIES.get(config.model_type) if getattr(config, "image_token_id", None) is not None else None


def give_images(model: PreTrainedModel, store: ImageStore) -> ModelImages | None:
    """Let a bare model read images from a store; None, and nothing is done, if images are not read for its family."""
    family = family_of(model.config)
    if family is None:
        return None
    _given[model] = given = ModelImages(store, family)
    model.register_forward_pre_hook(_read_row, with_kwargs=True)
    if family.deep:
        model.get_submodule(family.language[0][:-1]).register_forward_pre_hook(_add_deep, with_kwargs=True)
    return given


def images_of(model: nn.Module) -> ModelImages | None:
    """Return the images of a bare model; None if it was given none."""
    return _given.get(model)


def language_attention(config: Any, name: str) -> str | dict[str, str]:
    """Return the form of transformers' `attn_implementation` that gives the language part `name`, and leaves its tower's as it is."""
    vision = getattr(config, "vision_config", None)
    if vision is None or family_of(config) is None:
        return name
    return {"": name, "text_config": name, "vision_config": vision._attn_implementation}


def is_language(config: Any, name: str) -> bool:
    """Whether a module belongs to the language part, which is all of a model without images."""
    family = family_of(config)
    return family is None or f"{name}.".startswith(family.language)


@dataclass(frozen=True, eq=False)
class RowImages:
    """A packed row with images, which its model reads within its forward pass, where parameters are gathered that ranks divide.

    Attributes:
        tokens: [R] int32.
        images: in order, each with the places of its placeholders, [P] int64.
    """

    tokens: np.ndarray
    images: tuple[tuple[StoredImage, np.ndarray], ...]


def row_inputs(model: Any, row: PackedRow) -> tuple[dict[str, Any], np.ndarray | None]:
    """Return the inputs of a packed row with images, and how far its tokens see where their attention is not causal.

    Sequences are checked: an image has all of its placeholders, in one run of the row. The inputs are `row_images`, and `position_ids`,
    [1, R] or [3, 1, R] int64; and in a family that `sees_whole`, the last position in its own sequence to which each token attends, [R]
    int64.

    Raises:
        ModelError: the model was given no images.
        DataError: as `find_images`.
    """
    given = images_of(model)
    if given is None:
        raise ModelError(f"a sequence has an image, and {type(model).__name__} was given none to read; give a model that reads images")
    segments, found, positions = row.segments, [], np.empty((3, len(row)), np.int64)
    after = np.zeros(len(segments), np.int64)  # rotary position behind each run
    for number, (start, length, prefix) in enumerate(zip(segments.starts, segments.lengths, segments.prefix, strict=True)):
        images = find_images(row.tokens[start : start + length], given.store)
        first = int(after[prefix]) if prefix >= 0 else int(row.positions[start])
        own = image_positions(int(length), images if given.family.grid else (), first=first)
        positions[:, start : start + length] = own
        after[number] = own.max(initial=first - 1) + 1
        found += [(image, start + places) for image, places in images]
    shown = upload(positions, next(model.parameters()).device)
    inputs = {"row_images": RowImages(row.tokens, tuple(found)), "position_ids": shown[:, None] if given.family.grid else shown[:1]}
    return inputs, last_seen(row.positions, [places for _, places in found]) if given.family.sees_whole else None


def _read_row(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put what `embedded` gives in the place of `row_images`; an image that is there more than once runs once."""
    given, row = images_of(model), kwargs.pop("row_images", None)
    if given is None or (row is None and not (given.touches_all and torch.is_grad_enabled())):
        return args, kwargs
    if row is None:
        tokens = kwargs.pop("input_ids")
        made = embedded(model, tokens, [])
    else:
        features = given.features(model, [image for image, _ in row.images])
        tokens = upload(row.tokens.astype(np.int64), next(model.parameters()).device)[None]
        made = embedded(model, tokens, [(places, features[image.id]) for image, places in row.images])
    if given.touches_all and torch.is_grad_enabled():
        made["inputs_embeds"] = made["inputs_embeds"] + _nothing(model)
    return args, {**kwargs, **made}


@contextmanager
def _computing_locally(module: nn.Module) -> Iterator[None]:
    """Let a module compute with parameters of its own, such as LLaVA's ends of rows, outside of its forward pass, where ranks divide it."""
    kept = dict(module._parameters)
    parts: dict[str, Any] = {name: local_part(parameter) for name, parameter in kept.items()}
    module._parameters.update(parts)
    try:
        yield
    finally:
        module._parameters.update(kept)


def _nothing(model: nn.Module) -> Tensor | float:
    """Return 0, whose gradient for each trained parameter outside of the language part is zeros."""
    others = [parameter for name, parameter in model.named_parameters() if parameter.requires_grad and not is_language(model.config, name)]
    return sum((local_part(parameter).reshape(-1)[:1].float().sum() for parameter in others), 0.0) * 0.0


def last_seen(positions: np.ndarray, images: Sequence[np.ndarray]) -> np.ndarray:
    """Return the last positions to which tokens at `positions` [R] attend, [R] int64: for places [P] of an image, that of its last one."""
    ends = positions.astype(np.int64)
    for places in images:
        ends[places] = ends[places[-1]]
    return ends


def embedded(model: Any, tokens: Tensor, features: Sequence[tuple[np.ndarray, Tensor]]) -> dict[str, Any]:
    """Return the inputs of tokens [N, L] int64 whose images are known: `inputs_embeds` [N, L, H], and with D > 1 also `image_layers`.

    `features` of images are the places [P] int64 of placeholders among the N * L tokens, each place once, and their features
    [P, D * H]. For `image_layers` see `_add_deep`.
    """
    embeds = model.get_input_embeddings()(torch.where(tokens >= FIRST_ID, 0, tokens))
    if not features:
        return {"inputs_embeds": embeds}
    places = np.concatenate([place for place, _ in features])
    rows = torch.cat([rows for _, rows in features]).to(embeds.dtype)
    first, *deep = rows.split(embeds.shape[-1], dim=-1)
    where = upload(places, embeds.device)
    inputs: dict[str, Any] = {"inputs_embeds": embeds.flatten(0, 1).index_copy(0, where, first).view_as(embeds)}
    if deep:
        order = upload(np.argsort(places), embeds.device)
        inputs["image_layers"] = tokens >= FIRST_ID, [layer[order] for layer in deep]
    return inputs


def _add_deep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hand a language part the features of its first layers: `image_layers`, which is a mask of placeholders [N, L] and [K, H] for each."""
    if (layers := kwargs.pop("image_layers", None)) is not None:
        kwargs["visual_pos_masks"], kwargs["deepstack_visual_embeds"] = layers
    return args, kwargs


def has_images(tokens: np.ndarray) -> bool:
    """Whether tokens of any shape hold an image."""
    return bool(is_image(tokens).any())


def _of_like_shapes(images: Sequence[StoredImage], family: ImageFamily) -> list[list[StoredImage]]:
    """Divide images into those whose arrays can be joined."""
    groups: dict[object, list[StoredImage]] = {}
    for image in images:
        shapes = tuple(
            (name, *(size for axis, size in enumerate(image.arrays[name].shape) if axis != joined))
            for name, joined in family.joins.items() if name in image.arrays)
        groups.setdefault(shapes, []).append(image)
    return list(groups.values())
