"""Images in prompts of a vLLM server: the values that the run's image process has made of them, by the ids in the tokens.

Used by `vllm_inside`, in the API server. vLLM processes no pixels: a prompt with ids of images (`offbeat.data.image_store`) becomes one
with the model's image token in their places, the arrays of the image's file, whose hash is checked, and the hash, by which vLLM shares the
features of an image among requests. The tokens of an image are checked as in the trainer.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch
from vllm.exceptions import VLLMValidationError
from vllm.inputs import mm_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem, MultiModalKwargsItems, PlaceholderRange
from vllm.v1.engine.async_llm import AsyncLLM
from vllm_files import import_offbeat


@dataclasses.dataclass(frozen=True)
class Intake:
    """How vLLM's model of a family takes the arrays of an image.

    Attributes:
        parts: arrays whose first dimension runs over an image's parts, such as tiles or patches.
        count: name under which it is told the number of parts; empty if it is not told.
        stacked: whether stored arrays have a dimension of images before that of parts.
        tells_token: whether it is told the image token.
    """

    parts: tuple[str, ...] = ("pixel_values",)
    count: str = ""
    stacked: bool = False
    tells_token: bool = False


_TILES = Intake(("pixel_values", "pixel_attention_mask"), count="num_patches", stacked=True)
INTAKES: Mapping[str, Intake] = {
    "idefics3": _TILES, "internvl": Intake(count="image_num_patches", tells_token=True), "qwen2_5_vl": Intake(), "qwen2_vl": Intake(),
    "qwen3_vl": Intake(), "smolvlm": _TILES}
"""By the types of models; those of `offbeat.config.engine_kinds`."""


class ImagePrompts:
    """Makes the prompts of one server."""

    def __init__(self, folder: str, *, model_type: str, token: int, dtype: torch.dtype) -> None:
        """`folder` has the images, if any; `token` stands for them in the vocabulary, and `dtype` is what the model computes in."""
        self._images = import_offbeat("data.image_store")
        self._store = self._images.ImageStore(folder) if folder else None
        self._model_type = model_type
        self._token = token
        self._dtype = dtype

    def read(self, prompt: Any) -> Any:
        """Return a prompt whose tokens have ids of images with these images; any other stays as it is.

        Raises:
            VLLMValidationError: an image cannot be read or is not what its id stands for, has other placeholders than the trainer's, or
                is there without an id; or this server takes no images.
        """
        given = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if not given or "mm_kwargs" in prompt or max(given) < self._images.FIRST_ID:
            return prompt
        tokens = np.asarray(given)
        if (intake := INTAKES.get(self._model_type)) is None:
            raise VLLMValidationError(f"images are not read for models of type {self._model_type!r} on vLLM, but for {', '.join(INTAKES)}")
        if self._store is None:
            raise VLLMValidationError("the server has no images: start it with OFFBEAT_IMAGES, the folder .images beside the run's")
        if (tokens == self._token).any():
            raise VLLMValidationError(f"the prompt has the image token {self._token} where no image is; give the prompt as it was made")
        try:
            found = self._images.find_images(tokens, self._store)
        except import_offbeat("errors").DataError as exc:
            raise VLLMValidationError(str(exc)) from exc
        plain = np.where(self._images.is_image(tokens), self._token, tokens).tolist()
        return mm_input(
            plain, MultiModalKwargsItems({"image": [self._item(image.arrays, intake) for image, _ in found]}),
            {"image": [image.digest for image, _ in found]}, {"image": [_range_of(tokens, places) for _, places in found]},
            cache_salt=prompt.get("cache_salt"))

    def _item(self, stored: Mapping[str, np.ndarray], intake: Intake) -> MultiModalKwargsItem:
        arrays = {name: torch.from_numpy(np.array(array[0] if intake.stacked else array)) for name, array in stored.items()}
        arrays = {name: array.to(self._dtype) if array.is_floating_point() else array for name, array in arrays.items()}
        number = torch.tensor([len(arrays[intake.parts[0]])])
        fields = {name: MultiModalFieldConfig.flat_from_sizes("image", number) for name in intake.parts}
        if intake.count:
            arrays[intake.count] = number
        if intake.tells_token:
            arrays["image_token_id"] = torch.tensor(self._token)
            fields["image_token_id"] = MultiModalFieldConfig.shared("image", 1, keep_on_cpu=True)
        fields = {name: fields.get(name) or MultiModalFieldConfig.batched("image", keep_on_cpu=True) for name in arrays}
        return MultiModalKwargsItems.from_hf_inputs(arrays, fields)["image"][0]


def _range_of(tokens: np.ndarray, places: Sequence[int]) -> PlaceholderRange:
    """Return where an image stands: from its first placeholder to its last, with which tokens between them are features."""
    start, stop = int(places[0]), int(places[-1]) + 1
    return PlaceholderRange(offset=start, length=stop - start, is_embed=torch.from_numpy(tokens[start:stop] == tokens[start]))


def give_images(engine: AsyncLLM, folder: str) -> None:
    """Let an engine take prompts with ids of the images in a folder if its model reads images; an empty one refuses them in a sentence."""
    config = engine.model_config.hf_config
    token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    if token is not None:
        prompts = ImagePrompts(folder, model_type=config.model_type, token=token, dtype=engine.model_config.dtype)
        engine.add_request = with_images(engine.add_request, prompts)  # type: ignore[method-assign]


def with_images(add_request: Callable[..., Any], prompts: ImagePrompts) -> Callable[..., Any]:
    """Wrap `AsyncLLM.add_request`, so that prompts may have ids of images; their files are read on a thread."""

    @wraps(add_request)
    async def add(request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        return await add_request(request_id, await asyncio.to_thread(prompts.read, prompt), *args, **kwargs)

    return add
