"""What a forward path is, how one is chosen for a model, and the check that it passes before it serves.

Two implementations: `forward_direct` (own code, Llama- and Qwen-like models) and `forward_hf` (any model's modules). Both answer from
the same `SlotCache`, name weights as Hugging Face does, and swap prepared weights in microseconds. `Forward.device` says where an
engine computes: its weights, cache and sampler are there, and every tensor that a `Forward` takes or gives.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import ModelError
from offbeat.inference.embedded.cache import CacheShape, DecodeStep, PromptRows, SlotCache
from offbeat.inference.embedded.lora import AdapterRows, Groups

CHECK_TOLERANCE = 1e-3
"""A difference of log-probabilities that is right in any number format."""

CHECK_NOISE = 2.0
"""A difference that is right is at most so many times the effect of moving the norms by one step of the number format.

On pretrained and on random models of five families it is 0.3 to 0.5 times that effect in bfloat16, and 0.8 to 3 times in float32, where
both are far below `CHECK_TOLERANCE`. A model that forgets what stood before differs by 30 times as much and more.
"""

_CHECK_PROMPT, _CHECK_LENGTH = 8, 24

LOGITS_AT_ONCE = 1 << 26
"""Numbers, 256 MiB of them, in the logits that a score of many tokens holds in memory."""


class Forward(Protocol):
    """A model that prefills, decodes and scores. Not thread-safe, except for `prepare`.

    Attributes:
        max_score_tokens: most tokens, padding included, that are scored together, for all of their logits may be in memory at once.
        lora_groups: its linear layers that adapters may stand beside. `lora`, where given, has an adapter for each row of a batch, which is
            each token of a prefill.
    """

    device: torch.device
    cache_shape: CacheShape
    vocab_size: int
    max_positions: int
    max_score_tokens: int
    lora_groups: Groups

    def prefill(
        self, tokens: Tensor, lengths: Tensor, *, cache: SlotCache, rows: PromptRows, lora: AdapterRows | None = None
    ) -> Tensor:
        """Run prompts and store their keys and values.

        Args:
            tokens: [N, L] int64, padded on the right with any valid id.
            lengths: [N] int64, tokens that count in each row.
            cache: has room for the slots in `rows` and L positions.
            rows: which slots receive which prompt.

        Returns:
            [N, V], logits after each prompt's last token.
        """
        ...

    def decode(self, tokens: Tensor, step: DecodeStep, *, lora: AdapterRows | None = None) -> Tensor:
        """Run one token per slot, [B] int64, store its keys and values; returns the logits after it, [B, V]."""
        ...

    def score(self, tokens: Tensor, *, lora: AdapterRows | None = None) -> Iterable[Tensor]:
        """Logits after every token of [N, L] int64, padded on the right with any valid id: [rows, V] each, N * L rows in all, in order.

        They are computed as they are read, so that those of a long text need not be in memory at once. Touches no cache.
        """
        ...

    def prepare(self, state: Mapping[str, Tensor]) -> Any:
        """Turn tensors, on any device, under their Hugging Face names into weights for `install`; may run on any thread.

        Raises:
            ModelError: a tensor is missing or has the wrong shape.
        """
        ...

    def install(self, prepared: Any) -> None:
        """Serve prepared weights from the next call on."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The weights that serve now, under their Hugging Face names; a tied tensor stands once."""
        ...


def take(state: Mapping[str, Tensor], name: str, *, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of a state, checked, converted and copied to the device: a file behind it is read now, not during a switch.

    Raises:
        ModelError: it is missing or has another shape.
    """
    if name not in state:
        raise ModelError(f"weights lack the tensor {name!r}; publish every tensor of the model under its Hugging Face name")
    tensor, wanted = state[name], tuple(shape)
    if tuple(tensor.shape) != wanted:
        raise ModelError(f"weights hold {name!r} with shape {tuple(tensor.shape)}, not {wanted}; publish weights of the same model")
    return tensor.detach().to(device, dtype, copy=True)


@torch.inference_mode()
def check_forward(forward: Forward, reference: Tensor | None = None) -> None:
    """Prove that a full forward gives what transformers' own gives, and decoding from the cache what a full forward does.

    Each within the noise that this model has in its number format.

    Args:
        reference: [L, V], transformers' logits after `ordinary_tokens`; None to leave that out.

    Raises:
        ModelError: one differs; the model computes something, or keeps state, that the forward path does not.
    """
    tokens = ordinary_tokens(forward.vocab_size).to(forward.device)
    full = _full_logprobs(forward, tokens)
    errors = {"decoding with the slot cache differs from a full forward": _difference(_decoded_logprobs(forward, tokens), full)}
    if reference is not None:
        own = reference[_CHECK_PROMPT - 1 :].to(forward.device).float().log_softmax(-1)
        errors["the embedded engine's full forward differs from transformers' own"] = _difference(full, own)
    what, error = max(errors.items(), key=lambda item: item[1] if item[1] == item[1] else float("inf"))
    if error <= CHECK_TOLERANCE:
        return
    noise = _rounding_noise(forward, tokens, full)
    if not error <= CHECK_NOISE * noise:
        dtype = str(forward.cache_shape.dtype).removeprefix("torch.")
        raise ModelError(
            f"{what} by {error:.3g} in log-probability, of which rounding to {dtype} explains {CHECK_NOISE * noise:.3g}; the model computes"
            f" something or keeps state that the embedded engine does not, or is not fit for {dtype}: use another engine, or the other"
            " model.dtype")


def ordinary_tokens(vocab_size: int) -> Tensor:
    """[L] int64, spread over the vocabulary: its first tokens are often special, and no text has them one after the other."""
    spread = np.arange(1, _CHECK_LENGTH + 1) * 0.6180339887498949 % 1.0  # of the golden ratio: no two are near
    return torch.from_numpy((spread * vocab_size).astype(np.int64))


def _full_logprobs(forward: Forward, tokens: Tensor) -> Tensor:
    """[steps, V] after the last tokens, of one pass over them all."""
    return torch.cat(list(forward.score(tokens[None])))[_CHECK_PROMPT - 1 :].float().log_softmax(-1)


def _decoded_logprobs(forward: Forward, tokens: Tensor) -> Tensor:
    """The same, of a prompt and steps after it."""
    cache = SlotCache(forward.cache_shape, device=forward.device, max_slots=1, max_positions=len(tokens))
    cache.reserve(slots=1, positions=len(tokens))
    zero = torch.zeros(1, dtype=torch.int64, device=forward.device)
    length = torch.full((1,), _CHECK_PROMPT, device=forward.device)
    logits = [forward.prefill(tokens[None, :_CHECK_PROMPT], length, cache=cache, rows=PromptRows(zero, zero))]
    logits += [forward.decode(tokens[i : i + 1], cache.step(np.array([i]))) for i in range(_CHECK_PROMPT, len(tokens))]
    return torch.cat(logits).float().log_softmax(-1)


def _difference(logprobs: Tensor, wanted: Tensor) -> float:
    """Root mean square over tokens as they are likely: what is never drawn may be far off, and no sample shows it."""
    return ((logprobs - wanted).square() * wanted.exp()).sum(-1).mean().sqrt().item()


def _rounding_noise(forward: Forward, tokens: Tensor, full: Tensor) -> float:
    """What a full forward changes by when the numbers in the model are rounded otherwise.

    Norms and biases are moved by one step of the number format, up or down at random, and back: every activation that they touch is then
    off by as much as rounding may make it.
    """
    live = forward.tensors().values()
    vectors = [tensor for tensor in live if tensor.ndim == 1] or list(live)
    saved = [tensor.clone() for tensor in vectors]
    generator = torch.Generator().manual_seed(0)
    for tensor in vectors:
        signs = torch.randint(2, tensor.shape, generator=generator).to(tensor.device, tensor.dtype) * 2 - 1
        tensor.mul_(1 + torch.finfo(tensor.dtype).eps * signs)
    noise = _difference(_full_logprobs(forward, tokens), full)
    for tensor, before in zip(vectors, saved, strict=True):
        tensor.copy_(before)
    return noise
