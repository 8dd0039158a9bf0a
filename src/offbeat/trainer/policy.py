"""The policy in training: loaded without dropout, its rows, log-probabilities and losses. Shared by all engines of the trainer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.algorithms.losses import TokenLosses
from offbeat.algorithms.presets import LossInputs, Objective
from offbeat.config.train import TrainConfig
from offbeat.data.batch import TokenBatch
from offbeat.data.packing import PackedRow, pack_row
from offbeat.dist.platform import current_platform
from offbeat.model.load import load_causal_lm
from offbeat.model.logprobs import token_logprobs
from offbeat.model.rows import settle_rows


@dataclass(frozen=True, eq=False)
class ScoredRow:
    """M tokens of a row after a forward pass.

    Attributes:
        logprobs: [M] float32 with gradient.
        entropy: [M] float32, nats.
        losses: [M] float32 with gradient, times their loss weights.
        found: the same without weights, and what else is to be reported.
    """

    logprobs: Tensor
    entropy: Tensor
    losses: Tensor
    found: TokenLosses


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


def row_of(batch: TokenBatch, indices: np.ndarray, *, share_prefix: bool, families: np.ndarray | None = None) -> PackedRow:
    """The row of some sequences, whose `batch_index` and `owner` point into the whole batch; no tokens when they score nothing.

    Args:
        families: [N] int64, of the whole batch; see `pack_row`.
    """
    part = batch.select(indices)
    row = pack_row(part, share_prefix=share_prefix, families=None if families is None else families[indices])
    shifts = np.repeat(batch.offsets[indices] - part.offsets[:-1], part.lengths)
    return replace(row, batch_index=row.batch_index + shifts[row.batch_index], owner=indices[row.owner])


def score_row(
    model: nn.Module, batch: TokenBatch, row: PackedRow, *, chosen: Objective, temperature: float, prox: Tensor | None = None,
) -> ScoredRow:
    """Forward, and the losses of the tokens trained on.

    Args:
        temperature: of the sampling.
        prox: [M] float32 log-probabilities under the proximal policy; None takes those of this pass.
    """
    logprobs, entropy = token_logprobs(model, row, temperature=chosen.temperature(temperature), with_entropy=True)

    def pick(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[row.batch_index]).to(logprobs.device)

    found = chosen.loss(LossInputs(
        logprobs=logprobs, prox_logprobs=logprobs.detach() if prox is None else prox,
        rollout_logprobs=pick(batch.rollout_logprobs), advantages=pick(batch.advantages)))
    return ScoredRow(logprobs, entropy, found.losses * pick(batch.loss_weights), found)


def canary_logprobs(model: nn.Module, tokens: Sequence[int]) -> tuple[float, ...]:
    """Log-probability at temperature 1, in the model's own number format, of each given token but the first."""
    length = len(tokens)
    zeros = np.zeros(length, np.float32)
    batch = TokenBatch(
        tokens=np.asarray(tokens, np.int32), loss_mask=np.arange(length) > 0, rollout_logprobs=zeros, advantages=zeros,
        loss_weights=zeros, offsets=np.array([0, length]), group_ids=np.zeros(1), prefix_lens=np.zeros(1))
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
