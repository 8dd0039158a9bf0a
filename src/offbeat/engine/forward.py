"""The interface of a forward path, and the check that each one passes before it serves.

There are two implementations: `forward_direct` (own code for Llama- and Qwen-like models) and `forward_hf` (any model's own modules). Both
use the same `SlotCache`, name weights as Hugging Face does, and swap prepared weights in microseconds. `Forward.device` says where an
engine computes: its weights, cache and sampler are there, and every tensor that a `Forward` takes or gives.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from offbeat.engine.cache import CacheShape, DecodeStep, PrefillStep, SlotCache
from offbeat.engine.lora import AdapterRows, Groups
from offbeat.errors import ModelError
from offbeat.model.fingerprint import fingerprint

CHECK_TOLERANCE = 1e-3
"""Difference of log-probabilities that passes in any number format."""

CHECK_NOISE = 2.0
"""Largest difference that passes, as a multiple of the effect of moving the norms by one step of the number format.

On pretrained and on random models of five families the difference is 0.3 to 0.5 times that effect in bfloat16, and 0.8 to 3 times in
float32, where both are far below `CHECK_TOLERANCE`. A model that forgets its context differs by 30 times as much and more.
"""

QUANTISED_TOLERANCE = 1.0
"""Largest difference of a quantised model's log-probabilities from the model's: three to four times what SmolLM2-135M has in
int8, and twice what it has with activations of 7 bits."""

_CHECK_PROMPT, _CHECK_LENGTH = 8, 24

LOGITS_AT_ONCE = 1 << 26
"""Most numbers in the logits that scoring holds in memory at once; 256 MiB of them."""


class Forward(Protocol):
    """A model that prefills, decodes and scores. Not thread-safe, except for `prepare`.

    Attributes:
        max_score_tokens: most tokens, padding included, that may be scored together, because all of their logits may be in memory at once.
        takes_changes: whether `tensors` returns the weights as they were published, so that changes to them make the next version.
        row_multiple: the rows of a product are filled up to a multiple of this; above 1, a token's numbers do not depend on the batch.
        reads_images: whether tokens may be placeholders of stored images (`data.image_store`).
        sees_whole: whether an image's placeholders attend to later ones of it, so that a prefill must not end between them.
        lora_groups: the linear layers that can take adapters. `lora`, where given, has an adapter for each row of a batch; in a prefill
            each token is a row.
    """

    device: torch.device
    cache_shape: CacheShape
    vocab_size: int
    max_positions: int
    max_score_tokens: int
    takes_changes: bool
    row_multiple: int
    reads_images: bool
    sees_whole: bool
    lora_groups: Groups

    def prefill(
        self, tokens: Tensor, step: PrefillStep, *, lora: AdapterRows | None = None, sequences: Sequence[np.ndarray] | None = None,
    ) -> Tensor:
        """Run the new tokens of N sequences, [N, L] int64 padded on the right with any valid id, and store their keys and values.

        Where one of them has images, `sequences` are all of its tokens up to the last new one, [K] int64 each. Returns the logits [N, V]
        after each sequence's last token.
        """
        ...

    def decode(self, tokens: Tensor, step: DecodeStep, *, lora: AdapterRows | None = None, shifts: np.ndarray | None = None) -> Tensor:
        """Run one token per slot, [B] int64, and store its keys and values; returns the logits after it, [B, V].

        `shifts` are [B] int64 of `shift_of`; None where there are no images.
        """
        ...

    def shift_of(self, tokens: np.ndarray) -> int:
        """Return what the rotary position of the token after a prompt [L] int64 is ahead of L; not 0 for some prompts with images."""
        ...

    def score(self, tokens: Tensor, *, lora: AdapterRows | None = None) -> Iterable[Tensor]:
        """Compute logits after every token of [N, L] int64, padded on the right with any valid id.

        Yields parts [rows, V] in order, N * L rows in all. Each part is computed when it is read, so that the logits of a long text need
        not be in memory at once. Does not touch a cache.
        """
        ...

    def prepare(self, state: Mapping[str, Tensor]) -> Any:
        """Convert tensors, on any device, under their Hugging Face names ("lm_head.weight" [V, H]) to the form that `install` takes.

        May run on any thread. Raises ModelError if a tensor is missing or has the wrong shape.
        """
        ...

    def install(self, prepared: Any) -> None:
        """Serve prepared weights from the next call on."""
        ...

    def installed(self) -> Any:
        """Return the weights being served in the form that `install` takes; may run on any thread."""
        ...

    def release(self) -> None:
        """Free the memory of the weights; only `prepare` and `install` may be called until others are installed."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights being served under their Hugging Face names, such as "lm_head.weight" [V, H]; a tied tensor appears once."""
        ...

    def fingerprinter(self) -> Callable[[], str]:
        """Return a function that computes the fingerprint of the weights being served now, on any thread and even after others are."""
        ...


def checked_tensor(state: Mapping[str, Tensor], name: str, *, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Check a tensor of a state, such as [V, H], convert it and copy it to the device. A file behind it is read now, not during a switch.

    Raises ModelError if the tensor is missing or has another shape.
    """
    if name not in state:
        raise ModelError(f"weights lack the tensor {name!r}; publish every tensor of the model under its Hugging Face name")
    tensor, wanted = state[name], tuple(shape)
    if tuple(tensor.shape) != wanted:
        raise ModelError(f"weights hold {name!r} with shape {tuple(tensor.shape)}, not {wanted}; publish weights of the same model")
    return tensor.detach().to(device, dtype, copy=True)


def fingerprint_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Compute the trainer's fingerprint of the same weights, such as "lm_head.weight" [V, H]; see `fingerprint`."""
    return fingerprint(bytes_of(tensors.items()))


def bytes_of(tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, np.ndarray]]:
    """Yield the name and the bytes, [B] uint8, of each tensor, such as "lm_head.weight" [V, H], when it is its turn."""
    return ((name, tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()) for name, tensor in tensors)


@torch.inference_mode()
def check_forward(forward: Forward, reference: Tensor | None = None) -> None:
    """Prove that a full forward pass agrees with transformers' own, and decoding from the cache with a full forward pass.

    Both must agree within the rounding noise of this model in its number format. `reference` [L, V] are transformers' logits after
    `ordinary_tokens`; None skips that comparison.

    Raises:
        ModelError: they differ, because the model computes something, or keeps state, that the forward path does not.
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


@torch.inference_mode()
def check_quantised(forward: Forward, reference: Tensor) -> None:
    """Prove that the quantised form of a model is still that model, and that decoding from the cache agrees with a full forward pass.

    Raises ModelError above a difference of `QUANTISED_TOLERANCE` from `reference` [L, V], transformers' logits after `ordinary_tokens`.
    """
    tokens = ordinary_tokens(forward.vocab_size)
    own = reference[_CHECK_PROMPT - 1 :].float().log_softmax(-1)
    errors = [_difference(found(forward, tokens), own) for found in (_full_logprobs, _decoded_logprobs)]
    error = max(errors, key=lambda error: error if error == error else float("inf"))
    if not error <= QUANTISED_TOLERANCE:
        raise ModelError(
            f"the int8 form of the model differs from the model by {error:.3g} in log-probability, more than {QUANTISED_TOLERANCE:g}: it"
            ' is not fit for int8; use inference.quantization = "none"')


def ordinary_tokens(vocab_size: int, length: int = _CHECK_LENGTH) -> Tensor:
    """Return [L] int64 ids spread over the vocabulary. Its first ids are often special tokens, and no text has those in a row."""
    spread = np.arange(1, length + 1) * 0.6180339887498949 % 1.0  # golden-ratio multiples: none are close
    return torch.from_numpy((spread * vocab_size).astype(np.int64))


def _full_logprobs(forward: Forward, tokens: Tensor) -> Tensor:
    """Return log-probabilities [S, V] of S steps after the last tokens, from one forward pass over `tokens` [L] int64."""
    return torch.cat(list(forward.score(tokens[None])))[_CHECK_PROMPT - 1 :].float().log_softmax(-1)


def _decoded_logprobs(forward: Forward, tokens: Tensor) -> Tensor:
    """Return the log-probabilities [S, V] of `_full_logprobs`, from prefills of the prompt's beginning and its rest, and decode steps."""
    cache = SlotCache(forward.cache_shape, device=forward.device, max_slots=1, max_positions=len(tokens))
    begun = _CHECK_PROMPT // 2
    for start, stop in ((0, begun), (begun, _CHECK_PROMPT)):
        step = cache.prefill(np.zeros(1, np.int64), starts=np.array([start]), lengths=np.array([stop - start]))
        prompt = forward.prefill(tokens[None, start:stop], step)
    logits = [forward.decode(tokens[i : i + 1], cache.step(np.array([i]))) for i in range(_CHECK_PROMPT, len(tokens))]
    return torch.cat([prompt, *logits]).float().log_softmax(-1)


def _difference(logprobs: Tensor, wanted: Tensor) -> float:
    """Root mean square difference of log-probabilities [S, V], weighted by probability: tokens that are never drawn do not count."""
    return ((logprobs - wanted).square() * wanted.exp()).sum(-1).mean().sqrt().item()


def _rounding_noise(forward: Forward, tokens: Tensor, full: Tensor) -> float:
    """Measure how much a full forward pass, `full` [S, V], changes when numbers inside the model are rounded differently.

    Norms and biases are moved by one step of the number format, up or down at random, and moved back, so that every activation that depends
    on them changes by about a rounding error.
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
