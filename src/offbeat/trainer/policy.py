"""The policy in training: loaded without dropout, its rows, log-probabilities and losses. Shared by both trainers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.algorithms.losses import target_losses
from offbeat.config.train import TrainConfig
from offbeat.data.batch import Batch, gather_ranges
from offbeat.data.packing import PackedRow, pack_row
from offbeat.dist.platform import current_platform
from offbeat.model.load import load_causal_lm
from offbeat.model.logprobs import token_logprobs
from offbeat.model.rows import settle_rows


@dataclass(frozen=True, eq=False)
class ScoredRow:
    """M targets of a row after a forward pass.

    Attributes:
        logprobs: [M] float32 with gradient.
        losses: [M] float32 with gradient, times their loss weights.
        entropy: [M] float32, nats; empty where it was not asked for.
        means, maxima: what else is to be reported, see `TargetLosses`.
    """

    logprobs: Tensor
    losses: Tensor
    entropy: Tensor
    means: dict[str, Tensor]
    maxima: dict[str, Tensor]


def load_policy(model_folder: str, *, config: TrainConfig, dtype: str = "float32") -> PreTrainedModel:
    """A model on the CPU, with rows that are proven to give each sequence its own log-probabilities.

    Raises:
        ModelError: as `load_causal_lm` and `settle_rows`.
    """
    model = load_causal_lm(model_folder, dtype=dtype, attention=None)
    _silence_dropout(model)
    # Some families route experts at random in training mode, as no engine does; but gradients are checkpointed in no other.
    model.train(config.gradient_checkpointing)
    settle_rows(model, share_prefix=config.share_prefix)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def row_of(batch: Batch, indices: np.ndarray, *, share_prefix: bool, families: np.ndarray | None = None) -> PackedRow:
    """The row of some sequences, whose `batch_index` and `owner` point into the whole batch; no tokens when they score nothing.

    Args:
        indices: [n] int64.
        families: [N] int64, of the whole batch; see `pack_row`.
    """
    row = pack_row(batch.select(indices), share_prefix=share_prefix, families=None if families is None else families[indices])
    return replace(row, batch_index=gather_ranges(batch.target_offsets, indices)[row.batch_index], owner=indices[row.owner])


def score_row(model: nn.Module, batch: Batch, row: PackedRow, *, temperature: float, with_entropy: bool = False) -> ScoredRow:
    """Forward, and the losses of the row's targets.

    Args:
        batch: that the row was made of.
        temperature: of the log-probabilities.
    """
    if with_entropy:
        logprobs, entropy = token_logprobs(model, row, temperature=temperature, with_entropy=True)
    else:
        logprobs = token_logprobs(model, row, temperature=temperature)
        entropy = logprobs.new_zeros(0)
    found = target_losses(logprobs, batch, row.batch_index)
    return ScoredRow(logprobs, found.losses, entropy, found.means, found.maxima)


def canary_logprobs(model: nn.Module, tokens: Sequence[int]) -> tuple[float, ...]:
    """Log-probability at temperature 1, in the model's own number format, of each given token but the first."""
    length = len(tokens)
    batch = Batch.of_next_tokens(
        np.asarray(tokens, np.int32), np.arange(length) > 0, lengths=[length], columns={}, losses=())
    return tuple(token_logprobs(model, pack_row(batch, share_prefix=False)).tolist())


def autocast(config: TrainConfig) -> torch.autocast:
    """Surrounds a forward pass: bfloat16 where the configuration says so."""
    return torch.autocast(current_platform.device_type, torch.bfloat16, enabled=config.autocast)


def _silence_dropout(model: PreTrainedModel) -> None:
    """Trained log-probabilities must be those of the policy that the engines sample, which have no dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                vars(module)[name] = 0.0
