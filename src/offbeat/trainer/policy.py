"""The policy in training: loading it without dropout, its rows, log-probabilities and losses. Shared by both trainers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.config.train import TrainConfig
from offbeat.data.batch import Batch, gather_ranges
from offbeat.data.packing import PackedRow, pack_row
from offbeat.losses.formulas import target_losses
from offbeat.model.load import load_causal_lm
from offbeat.model.logprobs import token_logprobs
from offbeat.model.rows import settle_rows
from offbeat.sync.platform import current_platform


@dataclass(frozen=True, eq=False)
class ScoredRow:
    """The M targets of a row after a forward pass.

    Attributes:
        logprobs: [M] float32 with gradient.
        losses: [M] float32 with gradient, multiplied by loss weights.
        entropy: [M] float32, nats; empty if it was not requested.
        means, maxima: further values to report; see `TargetLosses`.
    """

    logprobs: Tensor
    losses: Tensor
    entropy: Tensor
    means: dict[str, Tensor]
    maxima: dict[str, Tensor]


def load_policy(model_folder: str, *, config: TrainConfig, dtype: str = "float32") -> PreTrainedModel:
    """Load a model to the CPU, with rows proven to give each sequence its own log-probabilities.

    Raises:
        ModelError: as `load_causal_lm` and `settle_rows`.
    """
    model = load_causal_lm(model_folder, dtype=dtype, attention=None)
    _silence_dropout(model)
    # In training mode, some families route experts at random, as no engine does; but gradients are checkpointed in no other mode.
    model.train(config.gradient_checkpointing)
    settle_rows(model, share_prefix=config.share_prefix)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def row_of(batch: Batch, indices: np.ndarray, *, share_prefix: bool, families: np.ndarray | None = None) -> PackedRow:
    """Pack some sequences into a row whose `batch_index` and `owner` refer to the whole batch; it is empty if they score nothing.

    Args:
        indices: [n] int64, the sequences.
        families: [N] int64, for the whole batch; see `pack_row`.
    """
    row = pack_row(batch.select(indices), share_prefix=share_prefix, families=None if families is None else families[indices])
    return replace(row, batch_index=gather_ranges(batch.target_offsets, indices)[row.batch_index], owner=indices[row.owner])


def score_row(model: nn.Module, batch: Batch, row: PackedRow, *, temperature: float, with_entropy: bool = False) -> ScoredRow:
    """Run a forward pass, and compute the losses of the row's targets.

    Args:
        batch: the batch that the row was packed from.
        temperature: temperature of the log-probabilities.
    """
    if with_entropy:
        logprobs, entropy = token_logprobs(model, row, temperature=temperature, with_entropy=True)
    else:
        logprobs = token_logprobs(model, row, temperature=temperature)
        entropy = logprobs.new_zeros(0)
    found = target_losses(logprobs, batch, row.batch_index)
    return ScoredRow(logprobs, found.losses, entropy, found.means, found.maxima)


def canary_logprobs(model: nn.Module, tokens: Sequence[int]) -> tuple[float, ...]:
    """Return the log-probability, at temperature 1 and in the model's own number format, of each token but the first."""
    length = len(tokens)
    batch = Batch.of_next_tokens(
        np.asarray(tokens, np.int32), np.arange(length) > 0, lengths=[length], columns={}, losses=())
    return tuple(token_logprobs(model, pack_row(batch, share_prefix=False)).tolist())


def autocast(config: TrainConfig) -> torch.autocast:
    """Return the context of a forward pass: bfloat16 if the configuration says so."""
    return torch.autocast(current_platform.device_type, torch.bfloat16, enabled=config.autocast)


def _silence_dropout(model: PreTrainedModel) -> None:
    """Turn dropout off: trained log-probabilities must be those of the policy that engines sample, which have none."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                vars(module)[name] = 0.0
