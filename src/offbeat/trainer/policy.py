"""The policy in training: loading it without dropout, its rows, log-probabilities and losses. Shared by both trainers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.algorithms.objectives import reads_of
from offbeat.config.train import TrainConfig
from offbeat.data.batch import Batch, gather_ranges
from offbeat.data.packing import PackedRow, pack_row
from offbeat.losses.compose import target_losses
from offbeat.losses.metrics import Report
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
        entropy: [M] float32, nats; with gradient if a loss has an entropy term, empty if nothing asked for it.
        report: further values to report.
    """

    logprobs: Tensor
    losses: Tensor
    entropy: Tensor
    report: Report


def load_policy(model_folder: str, *, config: TrainConfig, dtype: str = "float32") -> PreTrainedModel:
    """Load a model to the CPU, with rows proven to give each sequence its own log-probabilities.

    Raises:
        ModelError: as `load_causal_lm` and `settle_rows`.
    """
    model = load_causal_lm(model_folder, dtype=dtype, attention=None)
    _silence_dropout(model)
    settle_rows(model, share_prefix=config.share_prefix)
    if config.gradient_checkpointing:
        _checkpoint_gradients(model)
    return model


def row_of(batch: Batch, indices: np.ndarray, *, share_prefix: bool, families: np.ndarray | None = None) -> PackedRow:
    """Pack some sequences into a row whose `batch_index` and `owner` refer to the whole batch; it is empty if they score nothing.

    Args:
        indices: [n] int64, the sequences.
        families: [N] int64, for the whole batch; see `pack_row`.
    """
    row = pack_row(batch.select(indices), share_prefix=share_prefix, families=None if families is None else families[indices])
    return replace(row, batch_index=gather_ranges(batch.target_offsets, indices)[row.batch_index], owner=indices[row.owner])


def score_row(model: nn.Module, batch: Batch, row: PackedRow, *, temperature: float, report: bool = False) -> ScoredRow:
    """Run a forward pass, and compute the losses of the row's targets.

    Args:
        batch: the batch that the row was packed from.
        temperature: temperature of the log-probabilities.
        report: whether entropy and metrics are computed.
    """
    trains_entropy = any("entropy" in reads_of(loss) for loss in batch.losses)
    if report or trains_entropy:
        logprobs, entropy = token_logprobs(
            model, row, temperature=temperature, with_entropy=True, entropy_gradient=trains_entropy)
    else:
        logprobs = token_logprobs(model, row, temperature=temperature)
        entropy = logprobs.new_zeros(0)
    found = target_losses(logprobs, batch, row.batch_index, entropy=entropy if trains_entropy else None, report=report)
    return ScoredRow(logprobs, found.losses, entropy, found.report)


def canary_logprobs(model: nn.Module, tokens: Sequence[int]) -> tuple[float, ...]:
    """Return the log-probability, at temperature 1 and in the model's own number format, of each token but the first."""
    length = len(tokens)
    batch = Batch.of_next_tokens(
        np.asarray(tokens, np.int32), np.arange(length) > 0, lengths=[length], columns={}, losses=())
    return tuple(token_logprobs(model, pack_row(batch, share_prefix=False)).tolist())


def autocast(config: TrainConfig) -> torch.autocast:
    """Return the context of a forward pass: bfloat16 if the configuration says so."""
    return torch.autocast(current_platform.device_type, torch.bfloat16, enabled=config.autocast)


def _checkpoint_gradients(model: PreTrainedModel) -> None:
    """Compute activations again in backward passes, with no module in training mode but those that do that.

    They do it in training mode only; but routers of some families choose experts at random in that mode, or jitter what they route by, as
    no engine does, and differently when activations are computed again.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        module.training = getattr(module, "gradient_checkpointing", False)


def _silence_dropout(model: PreTrainedModel) -> None:
    """Turn dropout off: trained log-probabilities must be those of the policy that engines sample, which have none."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith(("pdrop", "layerdrop"))):
                vars(module)[name] = 0.0
