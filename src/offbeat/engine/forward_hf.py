"""The general path: any Hugging Face causal model with its own modules, and attention over the slot cache. Chosen by `loader`.

Attention is registered with transformers' `AttentionInterface`; the model itself runs without a cache object. Before the model serves, a
forward pass of one token shows the shapes of its layers' keys and values; models that keep other state, such as recurrent layers, are
refused with a message. Weights are named as in a published checkpoint.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from offbeat.data.image_store import ImageStore, find_images, image_positions
from offbeat.engine.cache import CacheShape, DecodeStep, PrefillStep, add_mask, attend
from offbeat.engine.forward import LOGITS_AT_ONCE, checked_tensor, fingerprint_tensors
from offbeat.engine.lora import AdapterRows, Groups, Linear
from offbeat.errors import ModelError, first_line
from offbeat.model.attention import ATTENTION_KINDS, ScoreForm, explicit_attention, fused_attention, refuse_unknown, window_mask
from offbeat.model.checkpoint_names import module_names, published_names
from offbeat.model.fused_experts import adapt, expert_layers, find_experts
from offbeat.model.images import ModelImages, embedded, give_images, has_images, language_attention
from offbeat.model.load import context_length
from offbeat.model.lora_targets import adaptable
from offbeat.model.route_replay import RouteRecorder, records_routes
from offbeat.model.uploads import upload

ATTENTION = "offbeat_slots"

S = TypeVar("S", PrefillStep, DecodeStep)


@dataclass(frozen=True, eq=False)
class ScoreStep:
    """A pass over whole sequences that stores nothing; tokens attend up to the positions `seen` [N, L] int64, or causally if None."""

    seen: Tensor | None = None

    def mask(self, length: int, window: int | None, *, query: Tensor) -> Tensor | None:
        """Return the mask of `query`'s device and dtype, [N, 1, L, L] or [L, L], for layers with this window; None is plainly causal."""
        if self.seen is None:
            return window_mask(length, window, query.device)
        positions = torch.arange(length, device=query.device)[:, None]
        return add_mask(positions, width=length, window=window, dtype=query.dtype, seen=self.seen[:, None, :, None])


@dataclass(eq=False)
class ShapeStep:
    """A pass that stores nothing and records, by layer, the number of key heads and the head sizes of keys and values."""

    layers: dict[int, tuple[int, int, int]] = field(default_factory=dict)


@dataclass(eq=False)
class Windows(Generic[S]):
    """A step passing through the layers; masks of sliding windows are computed once."""

    step: S
    masks: dict[int, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """Return the step's mask, such as [B * num_kv_heads, 1, width], for layers with this sliding window; None is no window."""
        if window is None:
            return self.step.mask
        if window not in self.masks:
            self.masks[window] = self.step.window_mask(window)
        return self.masks[window]


Step = ShapeStep | ScoreStep | Windows[PrefillStep] | Windows[DecodeStep]


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (the interface's; causality is all there is to mask)
    scaling: float | None = None,
    sliding_window: int | None = None,
    offbeat_step: Step | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention for `HFForward`: query [N, heads, L, head_dim], key and value [N, kv_heads, L, head_dim] to [N, L, heads, head_dim].

    Where a layer's heads are smaller than the cache's, keys and values are padded with zeros, which change no score and are cut off again.
    """
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    form = ScoreForm(scale, softcap, s_aux)
    layer: int = module.layer_idx  # type: ignore[assignment]
    if isinstance(offbeat_step, ShapeStep):
        refuse_unknown(module, sliding_window, kwargs)
        offbeat_step.layers[layer] = key.shape[1], key.shape[3], value.shape[3]
        offbeat_step = ScoreStep()
    if offbeat_step is None:
        raise ModelError(f"{type(module).__name__} was not handed the keyword arguments of its model's forward; use another engine")
    if isinstance(offbeat_step, ScoreStep):
        mask = offbeat_step.mask(query.shape[2], sliding_window, query=query)
        return _attend_whole(query, key, value, mask, form).transpose(1, 2).contiguous(), None
    step, mask, size = offbeat_step.step, offbeat_step.mask(sliding_window), value.shape[3]
    query, key, value = (_filled(heads, step.head_dim) for heads in (query, key, value))
    if isinstance(step, PrefillStep):
        key, value = step.extend(layer, key, value)
        attended = _attend_whole(query, key, value, mask, form)
        return attended[..., :size].transpose(1, 2).contiguous(), None
    keys, values = step.extend(layer, key[:, :, 0], value[:, :, 0])
    assert mask is not None, "a decode step has a mask"
    if not form.is_plain:
        keys, values, mask = (part.unflatten(0, (len(query), -1)) for part in (keys, values, mask))
        attended = explicit_attention(query, keys, values, mask[:, :1], form=form)
    else:
        attended = attend(query.reshape(len(keys), -1, step.head_dim), keys, values, mask=mask, scale=scale)
    return attended[..., :size].reshape(len(query), 1, -1, size), None


def _attend_whole(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, form: ScoreForm) -> Tensor:
    """Compute attention of [N, heads, L, head_dim] to [N, kv_heads, width, head_dim]; without a mask it is causal, and both are as long."""
    if not form.is_plain:
        return explicit_attention(query, key, value, mask, form=form)
    return fused_attention(query, key, value, mask, scale=form.scale)


def _filled(heads: Tensor, size: int) -> Tensor:
    missing = size - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads


AttentionInterface.register(ATTENTION, slot_attention)


class HFForward:
    """Implements `forward.Forward` for any model. Owns the model that it is given."""

    def __init__(self, model: PreTrainedModel, *, dtype: torch.dtype, device: torch.device) -> None:
        config = model.config.get_text_config()
        others = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_KINDS)
        if others:
            raise ModelError(f"{type(model).__name__} has {others[0]} layers, which the embedded engine cannot decode; use another engine")
        if "logits_to_keep" not in inspect.signature(model.forward).parameters:
            raise ModelError(f"{type(model).__name__} cannot limit its logits to the last token (logits_to_keep); use another engine")
        self._model = model
        nn.Module.to(model, device).eval().requires_grad_(False)  # transformers' own `to` hides its types
        # Otherwise some models search every input for the padding token, which waits for the device and warns. Causality hides padding.
        model.config.pad_token_id = None
        self.device = device
        self.dtype = dtype
        self._recorder = RouteRecorder(model) if records_routes(model) else None
        self.cache_shape = _find_cache_shape(model, self._recorder, dtype=dtype, device=device)
        self.vocab_size = config.vocab_size
        self.max_positions = context_length(config)
        self.max_score_tokens = max(LOGITS_AT_ONCE // self.vocab_size, 1)
        self.row_multiple = 1
        self.reads_images = self.sees_whole = False
        # Without the output head, which sees only the last token of each row.
        head = model.get_output_embeddings()
        self._linears = {name: m for name, m in adaptable(model).items() if m is not head}
        self._experts = {name: (m, expert_layers(name, m)) for name, m in find_experts(model).items()}
        self.lora_groups: Groups = {
            **{name: (Linear(name, m.in_features, m.out_features),) for name, m in self._linears.items()},
            **{one.name: (Linear(one.name, one.num_in, one.num_out),) for _, layers in self._experts.values() for one in layers}}
        self.takes_changes = True
        self._lora: AdapterRows | None = None
        self._images: ModelImages | None = None
        self._hooked = False

    def read_images(self, store: ImageStore) -> None:
        """Take prompts with images of a store from now on, if the model reads images."""
        self._images = give_images(self._model, store)
        self.reads_images = self._images is not None
        self.sees_whole = self._images is not None and self._images.family.sees_whole

    def shift_of(self, tokens: np.ndarray) -> int:
        if self._images is None or not self._images.family.grid or not has_images(tokens):
            return 0
        return int(image_positions(len(tokens), find_images(tokens, self._images.store)).max()) + 1 - len(tokens)

    def prefill(
        self, tokens: Tensor, step: PrefillStep, *, lora: AdapterRows | None = None, sequences: Sequence[np.ndarray] | None = None,
    ) -> Tensor:
        inputs = {"input_ids": tokens, "position_ids": step.positions}
        if sequences is not None:
            starts = [int(row[0]) for row in step.positions.expand(len(tokens), -1).cpu()]
            inputs, seen = self._with_images(tokens, sequences, starts)
            if self.sees_whole:
                step.see(seen)
        return self._run(inputs, Windows(step), keep=step.last[:, None], lora=lora)[:, 0]

    def decode(self, tokens: Tensor, step: DecodeStep, *, lora: AdapterRows | None = None, shifts: np.ndarray | None = None) -> Tensor:
        positions = step.positions[:, None]
        if shifts is not None and shifts.any():
            positions = positions + upload(shifts, self.device)[:, None]
        return self._run({"input_ids": tokens[:, None], "position_ids": positions}, Windows(step), keep=1, lora=lora)[:, 0]

    def score(self, tokens: Tensor, *, lora: AdapterRows | None = None) -> Iterable[Tensor]:
        # All logits at once: models differ in the steps between the last layer and the logits.
        inputs, step = {"input_ids": tokens, "position_ids": torch.arange(tokens.shape[1], device=self.device)[None]}, ScoreStep()
        if self._images is not None and has_images(host := tokens.cpu().numpy()):
            inputs, seen = self._with_images(tokens, list(host), [0] * len(host))
            step = ScoreStep(upload(seen, self.device)) if self.sees_whole else step
        return [self._run(inputs, step, keep=0, lora=lora).flatten(0, 1)]

    def _with_images(self, tokens: Tensor, sequences: Sequence[np.ndarray], starts: Sequence[int]) -> tuple[dict[str, Any], np.ndarray]:
        """Return the inputs of sequences [K] with images, of which those from `starts` on are the new tokens [N, L] int64.

        Beside them, the last position to which each token attends if an image's placeholders attend to all of it, [N, L] int64.
        """
        assert self._images is not None, "prompts with images are refused otherwise"
        self._lora = None  # of the pass before; the tower takes no adapter
        of_rows = [find_images(sequence, self._images.store, cut=not self.sees_whole) for sequence in sequences]
        features = self._images.kept_features(self._model, [image for images in of_rows for image, _ in images])
        width, grid = tokens.shape[1], self._images.family.grid
        parts, positions = [], np.zeros((3, len(tokens), width), np.int64)
        seen = np.minimum(np.array(starts)[:, None] + np.arange(width), [[len(sequence) - 1] for sequence in sequences])
        for row, (sequence, start, images) in enumerate(zip(sequences, starts, of_rows, strict=True)):
            whole = image_positions(len(sequence), images if grid else ())[:, start:]
            positions[:, row, : whole.shape[1]] = whole
            for image, places in images:
                new = places >= start
                seen[row, places[new] - start] = places[-1]
                parts.append((row * width + places[new] - start, features[image.id][: len(places)][upload(new, self.device)]))
        shown = upload(positions, self.device)
        return {**embedded(self._model, tokens, parts), "position_ids": shown if grid else shown[0]}, seen

    def _run(self, inputs: Mapping[str, Any], step: Step, *, keep: int | Tensor, lora: AdapterRows | None) -> Tensor:
        self._lora = lora
        if lora is not None and not self._hooked:  # not earlier: a hook slows down every call
            self._hooked = True
            for name, linear in self._linears.items():
                linear.register_forward_hook(partial(self._add_lora, name))
            for name, (module, layers) in self._experts.items():
                adapt(module, _ServedExperts(self, name, tuple(one.name for one in layers)))
        if self._recorder is not None:
            self._recorder.clear()
        logits = self._model(**inputs, use_cache=False, logits_to_keep=keep, offbeat_step=step).logits
        if self._recorder is not None and isinstance(step, Windows):
            step.step.store_routes(self._recorder.routes())
        return logits

    def _add_lora(self, name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if self._lora is not None:
            x = inputs[0]
            self._lora.add(name, x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1]))

    # In inference mode, as the model was created: parameters and tensors of different modes fail in some layers.
    @torch.inference_mode()
    def prepare(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = module_names(self._model, state)
        return {
            name: checked_tensor(own, name, shape=p.shape, dtype=self.dtype, device=self.device)
            for name, p in self._model.named_parameters()}

    @torch.inference_mode()
    def install(self, prepared: dict[str, Tensor]) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.data = prepared[name]
        if self._images is not None:
            self._images.forget()

    @torch.inference_mode()
    def installed(self) -> dict[str, Tensor]:
        # Transformers keeps some parameters of a few families in float32, which published weights do not.
        return {name: parameter.data.to(self.dtype) for name, parameter in self._model.named_parameters()}

    @torch.inference_mode()
    def release(self) -> None:
        for parameter in self._model.parameters():
            parameter.data = parameter.data.new_empty(()).expand(parameter.shape)  # `prepare` reads the shapes

    @torch.inference_mode()
    def tensors(self) -> dict[str, Tensor]:
        return published_names(self._model, {name: parameter.data for name, parameter in self._model.named_parameters()})

    def fingerprinter(self) -> Callable[[], str]:
        return partial(fingerprint_tensors, self.tensors())


@dataclass(frozen=True, eq=False)
class _ServedExperts:
    """The adapters of a pass beside the experts of a module, whose layers are `groups`; see `ExpertAdapters`."""

    forward: HFForward
    module: str
    groups: tuple[str, ...]

    def take_part(self) -> bool:
        lora = self.forward._lora
        return lora is not None and any(map(lora.adapts, self.groups))

    def add(self, part: str, expert: int, x: Tensor, output: Tensor, rows: Tensor) -> Tensor:
        lora = self.forward._lora
        own = None if lora is None else lora.subset(rows)
        if own is not None:
            own.add(f"{self.module}.{part}.{expert}", x, output)
        return output


def _find_cache_shape(model: PreTrainedModel, recorder: RouteRecorder | None, *, dtype: torch.dtype, device: torch.device) -> CacheShape:
    """Find the shape of the keys and values that the layers store for a token, and of its routes, by running one token.

    Raises ModelError if a layer is no attention that the slot cache can hold.
    """
    name, seen = type(model).__name__, ShapeStep()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        model.set_attn_implementation(language_attention(model.config, ATTENTION))
        if model.config._attn_implementation == ATTENTION:
            with torch.inference_mode():
                model(input_ids=zero, position_ids=zero, use_cache=False, logits_to_keep=1, offbeat_step=seen)
    except ModelError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError, AssertionError) as exc:
        raise ModelError(f"{name} cannot run with the embedded engine's attention ({first_line(exc)}); use another engine") from exc
    num_layers = model.config.get_text_config().num_hidden_layers
    if sorted(seen.layers) != list(range(num_layers)):
        raise ModelError(f"{name} used the embedded engine's attention in {len(seen.layers)} of {num_layers} layers; use another engine")
    heads = {heads for heads, _, _ in seen.layers.values()}
    if len(heads) > 1:
        raise ModelError(f"{name} has layers of {min(heads)} and of {max(heads)} key heads, which no cache here holds; use another engine")
    head_dim = max(max(key, value) for _, key, value in seen.layers.values())
    routes = {} if recorder is None else {"num_routes": recorder.num_ids, "route_dtype": recorder.dtype}
    return CacheShape(num_layers, heads.pop(), head_dim, dtype, **routes)
