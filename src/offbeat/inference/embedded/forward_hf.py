"""The general path: any Hugging Face causal model, its own modules, with attention over the slot cache. Chosen by `loader`.

Attention is registered with transformers' `AttentionInterface`; the model itself runs without a cache object. Models that keep other
state (recurrent layers, soft-capped scores, attention sinks) are refused by name or by `check_forward`.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from offbeat.errors import ModelError
from offbeat.inference.embedded.cache import CacheShape, DecodeStep, PromptRows, SlotCache, attend
from offbeat.inference.embedded.forward import LOGITS_AT_ONCE, take
from offbeat.inference.embedded.lora import AdapterRows, Groups, Linear
from offbeat.model.load import context_length

ATTENTION = "offbeat_slots"


@dataclass(eq=False)
class PromptStep:
    """A prefill on its way through the layers; nothing is stored when `cache` is None."""

    cache: SlotCache | None
    rows: PromptRows | None


@dataclass(eq=False)
class SlotStep:
    """A decode step on its way through the layers; masks of sliding windows are made once."""

    step: DecodeStep
    windows: dict[int, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        if window is None:
            return self.step.mask
        if window not in self.windows:
            self.windows[window] = self.step.window_mask(window)
        return self.windows[window]


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (the interface's; causality is all there is to mask)
    scaling: float | None = None,
    sliding_window: int | None = None,
    offbeat_step: PromptStep | SlotStep | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention for `HFForward`: query [N, heads, L, head_dim], key and value [N, kv_heads, L, head_dim] to [N, L, heads, head_dim]."""
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelError(f"{type(module).__name__} wants attention with {name}, which the embedded engine lacks; use another engine")
    assert offbeat_step is not None, "the model hands its keyword arguments on to attention"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    if isinstance(offbeat_step, PromptStep):
        return _prompt_attention(query, key, value, layer=layer, step=offbeat_step, scale=scale, window=sliding_window), None
    keys, values = offbeat_step.step.extend(layer, key[:, :, 0], value[:, :, 0])
    queries = query.reshape(len(keys), -1, query.shape[-1])
    attended = attend(queries, keys, values, mask=offbeat_step.mask(sliding_window), scale=scale)
    return attended.view(query.shape[0], 1, -1, query.shape[-1]), None


def _prompt_attention(q: Tensor, k: Tensor, v: Tensor, *, layer: int, step: PromptStep, scale: float, window: int | None) -> Tensor:
    if step.cache is not None and step.rows is not None:
        step.cache.write_prompts(layer, k, v, step.rows)
    length = q.shape[2]
    mask = None
    if window is not None and window < length:
        position = torch.arange(length, device=q.device)
        distance = position[:, None] - position
        mask = (distance >= 0) & (distance < window)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True)
    return attended.transpose(1, 2).contiguous()


AttentionInterface.register(ATTENTION, slot_attention)


class HFForward:
    """See `forward.Forward`. Owns the model it is given."""

    def __init__(self, model: PreTrainedModel, *, dtype: torch.dtype, device: torch.device) -> None:
        config = model.config.get_text_config()
        others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if others:
            raise ModelError(
                f"the embedded engine serves full and sliding attention, and this {config.model_type} has {sorted(others)}; "
                "use another engine"
            )
        if "logits_to_keep" not in inspect.signature(model.forward).parameters:
            raise ModelError(f"{type(model).__name__} cannot limit its logits to the last token (logits_to_keep); use another engine")
        try:
            model.set_attn_implementation(ATTENTION)
        except ValueError as exc:
            raise ModelError(f"{type(model).__name__} does not take another attention ({exc}); use another engine") from exc
        self._model = nn.Module.to(model, device).eval().requires_grad_(False)  # transformers' own `to` hides its types
        # Else some models look for the padding token in every input: a wait for the device, and a warning. Causality hides padding.
        model.config.pad_token_id = None
        self.device = device
        self.dtype = dtype
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache_shape = CacheShape(config.num_hidden_layers, heads, head_dim, dtype)
        self.vocab_size = config.vocab_size
        self.max_positions = context_length(config)
        self.max_score_tokens = max(LOGITS_AT_ONCE // self.vocab_size, 1)
        # Without the head: it sees the last token of each row alone.
        head = model.get_output_embeddings()
        self._linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
        self.lora_groups: Groups = {name: (Linear(name, m.in_features, m.out_features),) for name, m in self._linears.items()}
        self._lora: AdapterRows | None = None
        self._hooked = False

    def prefill(
        self, tokens: Tensor, lengths: Tensor, *, cache: SlotCache, rows: PromptRows, lora: AdapterRows | None = None
    ) -> Tensor:
        step = PromptStep(cache, rows)
        return self._run(tokens, self._positions(tokens.shape[1]), step, keep=(lengths - 1)[:, None], lora=lora)[:, 0]

    def decode(self, tokens: Tensor, step: DecodeStep, *, lora: AdapterRows | None = None) -> Tensor:
        return self._run(tokens[:, None], step.positions[:, None], SlotStep(step), keep=1, lora=lora)[:, 0]

    def score(self, tokens: Tensor, *, lora: AdapterRows | None = None) -> Iterable[Tensor]:
        # All at once: what a model does between its last layer and its logits is its own.
        return [self._run(tokens, self._positions(tokens.shape[1]), PromptStep(None, None), keep=0, lora=lora).flatten(0, 1)]

    def _positions(self, length: int) -> Tensor:
        return torch.arange(length, device=self.device)[None]

    def _run(
        self, tokens: Tensor, positions: Tensor, step: PromptStep | SlotStep, *, keep: int | Tensor, lora: AdapterRows | None
    ) -> Tensor:
        self._lora = lora
        if lora is not None and not self._hooked:  # not before: a hook slows every call down
            self._hooked = True
            for name, linear in self._linears.items():
                linear.register_forward_hook(partial(self._add_lora, name))
        return self._model(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=keep, offbeat_step=step).logits

    def _add_lora(self, name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if self._lora is not None:
            x = inputs[0]
            self._lora.add(name, x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1]))

    def prepare(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: take(state, name, shape=p.shape, dtype=self.dtype, device=self.device) for name, p in self._model.named_parameters()}

    def install(self, prepared: dict[str, Tensor]) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.data = prepared[name]

    def tensors(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self._model.named_parameters()}
