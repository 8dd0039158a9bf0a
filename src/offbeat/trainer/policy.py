"""The policy in training: loading it without dropout, its rows, log-probabilities and losses. Shared by both trainers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from offbeat.algorithms.objectives import reads_of
from offbeat.config.model import ModelConfig
from offbeat.config.train import TrainConfig
from offbeat.data.batch import Batch
from offbeat.data.image_store import ImageStore, is_image
from offbeat.data.packing import PackedRow, pack_row
from offbeat.data.ranges import gather_ranges
from offbeat.errors import ModelError
from offbeat.losses.compose import target_losses
from offbeat.losses.metrics import Report
from offbeat.model.blocks import checkpoint_activations
from offbeat.model.divided_read import Divide, GiveHead
from offbeat.model.freeze import freeze
from offbeat.model.head import compute_in_float32
from offbeat.model.images import give_images
from offbeat.model.load import load_causal_lm
from offbeat.model.logprobs import packs_rows, token_logprobs
from offbeat.model.route_replay import replay_routes
from offbeat.model.rows import settle_rows
from offbeat.model.values import token_values
from offbeat.sync.platform import current_platform


class Predict(Protocol):
    """A forward pass that gives one prediction for each of a row's M targets."""

    def __call__(
        self, model: nn.Module, row: PackedRow, *, temperature: float, with_entropy: bool = False, entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return [M] float32 with gradient, and [M] float32 entropies where they were asked for and there are any."""
        ...


@dataclass(frozen=True, eq=False)
class ScoredRow:
    """The M targets of a row after a forward pass.

    Attributes:
        predictions: [M] float32 with gradient: log-probabilities, or values.
        losses: [M] float32 with gradient, multiplied by loss weights.
    """

    predictions: Tensor
    losses: Tensor
    report: Report


def load_policy(
    model_folder: str, *, config: TrainConfig, dtype: str = "float32", divide: Divide | None = None, give_head: GiveHead | None = None,
    float32_head: bool = False, images: Path | None = None,
) -> PreTrainedModel:
    """Load a model to the CPU, or its divided parts to the rank's device, with rows proven to give each sequence its own log-probabilities.

    Args:
        divide: as for `load_causal_lm`; all ranks must call then.
        give_head: replaces the output head: before the model is divided, or else at the end.
        float32_head: whether the output head computes in float32 under mixed precision, too.
        images: folder of the images in its sequences.

    Raises:
        ModelError, WholeOnlyError: as `load_causal_lm` and `settle_rows`.
    """
    model = load_causal_lm(model_folder, dtype=dtype, attention=None, divide=divide, give_head=give_head)
    _silence_dropout(model)
    mixed = isinstance(model, FSDPModule) and config.computes_in == "bf16_mixed"
    settle_rows(model, share_prefix=config.share_prefix, computes=torch.bfloat16 if mixed else None)
    checkpoint_activations(model, config.recomputes)
    if images is not None:
        give_images(model, ImageStore(images))
    freeze(model, config.freeze)
    if float32_head and config.computes_in == "bf16_mixed":
        compute_in_float32(model)
    if give_head is not None and divide is None:
        give_head(model)
    return model


def let_replay(model: PreTrainedModel, config: ModelConfig) -> PreTrainedModel:
    """Return the model, which replays its rows' experts if configured; raises ModelError as `replay_routes`, or if rows are not packed."""
    if config.route_replay == "off":
        return model
    if not packs_rows(model):
        raise ModelError(
            f'{type(model).__name__} cannot replay experts, because its sequences run one by one; set model.route_replay to "off"')
    replay_routes(model)
    return model


def row_of(batch: Batch, indices: np.ndarray, *, share_prefix: bool, families: np.ndarray | None = None) -> PackedRow:
    """Pack some sequences into a row whose `batch_index` and `owner` refer to the whole batch; it is empty if they score nothing.

    `indices` are [n] int64; `families`, [N] int64 for the whole batch, are those of `pack_row`.
    """
    row = pack_row(batch.select(indices), share_prefix=share_prefix, families=None if families is None else families[indices])
    return replace(row, batch_index=gather_ranges(batch.target_offsets, indices)[row.batch_index], owner=indices[row.owner])


def predict_logprobs(
    model: nn.Module, row: PackedRow, *, temperature: float, with_entropy: bool = False, entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Predict [M] log-probabilities, and [M] entropies or None, as a policy does; see `Predict` and `token_logprobs`."""
    if with_entropy:
        return token_logprobs(model, row, temperature=temperature, with_entropy=True, entropy_gradient=entropy_gradient)
    return token_logprobs(model, row, temperature=temperature), None


def predict_values(
    model: nn.Module, row: PackedRow, *, temperature: float, with_entropy: bool = False, entropy_gradient: bool = False,  # noqa: ARG001
) -> tuple[Tensor, Tensor | None]:
    """Predict [M] values as a value model does; see `Predict` and `token_values`. Values have no temperature and no entropy."""
    return token_values(model, row), None


def score_row(model: nn.Module, batch: Batch, row: PackedRow, *, predict: Predict, temperature: float, report: bool = False) -> ScoredRow:
    """Run a forward pass, and compute the losses of the row's targets in `batch`; entropy and metrics only for a `report`."""
    trains_entropy = any("entropy" in reads_of(loss) for loss in batch.losses)
    predictions, entropy = predict(
        model, row, temperature=temperature, with_entropy=report or trains_entropy, entropy_gradient=trains_entropy)
    found = target_losses(predictions, batch, row.batch_index, entropy=entropy if trains_entropy else None, report=report)
    if report and entropy is not None:
        found.report.means["train/entropy"] = entropy.detach()
    return ScoredRow(predictions, found.losses, found.report)


def canary_logprobs(model: nn.Module, tokens: Sequence[int]) -> tuple[float, ...]:
    """Return the log-probability, at temperature 1 and in the model's own number format, of each token but the first.

    In the place of an image's placeholder it is that of token 0, which no proof compares.
    """
    length = len(tokens)
    batch = Batch.of_next_tokens(np.asarray(tokens, np.int32), np.arange(length) > 0, lengths=[length], columns={}, losses=())
    batch = replace(batch, targets=np.where(is_image(batch.targets), 0, batch.targets))
    return tuple(token_logprobs(model, pack_row(batch, share_prefix=False)).tolist())


def autocast(config: TrainConfig, module: nn.Module) -> torch.autocast:
    """Return the context of a forward pass of `module`: bfloat16 if the configuration says so, unless FSDP2 casts."""
    enabled = config.computes_in == "bf16_mixed" and not isinstance(module, FSDPModule)
    return torch.autocast(current_platform.device_type, torch.bfloat16, enabled=enabled)


def _silence_dropout(model: PreTrainedModel) -> None:
    """Turn dropout off: trained log-probabilities must equal the engines' ones, which have none."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith(("pdrop", "layerdrop"))):
                vars(module)[name] = 0.0
