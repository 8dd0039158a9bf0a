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

CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest difference of a log-probability between a decode step and a full forward of the same tokens."""

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


def check_forward(forward: Forward) -> None:
    """Prove that decoding from the cache gives what a full forward gives, on a few tokens.

    Raises:
        ModelError: it does not; the model keeps state that the slot cache does not hold.
    """
    device = forward.device
    tokens = torch.arange(6, device=device) % forward.vocab_size
    cache = SlotCache(forward.cache_shape, device=device, max_slots=1, max_positions=len(tokens))
    cache.reserve(slots=1, positions=len(tokens))
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    forward.prefill(tokens[None, :4], torch.tensor([4]).to(device), cache=cache, rows=PromptRows(zero, zero))
    forward.decode(tokens[4:5], cache.step(np.array([4])))
    decoded = forward.decode(tokens[5:6], cache.step(np.array([5])))[0].float().log_softmax(-1)
    full = torch.cat(list(forward.score(tokens[None])))[-1].float().log_softmax(-1)
    error = (decoded - full).abs().max().item()
    if not error <= CHECK_TOLERANCE[forward.cache_shape.dtype]:
        raise ModelError(
            f"decoding with the slot cache differs from a full forward by {error:.3g} in log-probability; "
            "the embedded engine cannot serve this model, use another engine"
        )
