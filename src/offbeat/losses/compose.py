"""The loss of a batch, composed of its objective, constant weights and regularisers. Called by the trainer for each micro-batch.

    loss = sum over targets of loss_weights * (weight * objective + sum of coefficient * regulariser)

`loss_weights` hold all denominators; none is applied here. A target adds exactly 0 to the objective's part and to its gradient, whatever
its other values are, if its loss weight, its advantage or its weight is 0, or if it is outside gspo's mask. Cross-entropy over samples of a
policy imitates only those of positive advantage; an objective of the user's own also sees targets of advantage 0.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.algorithms.objectives import reads_of
from offbeat.config.objectives import is_own, objective_of
from offbeat.data.batch import Batch, LossSpec
from offbeat.losses.metrics import REPORTS, Report, pair_report, policy_report
from offbeat.losses.objectives import FORMULAS
from offbeat.losses.own import own_losses
from offbeat.losses.regularisers import regulariser
from offbeat.losses.targets import Targets, only
from offbeat.losses.weights import constant_weights
from offbeat.model.uploads import upload


@dataclass(frozen=True, eq=False)
class TargetLosses:
    """[M] float32 losses of M targets with gradient, multiplied by loss weights, and their metrics."""

    losses: Tensor
    report: Report = field(default_factory=Report)


def target_losses(
    logprobs: Tensor, batch: Batch, index: np.ndarray, *, entropy: Tensor | None = None, report: bool = False,
) -> TargetLosses:
    """Compute the losses of some targets, each by its sequence's own loss, multiplied by loss weights.

    Args:
        logprobs: [M] float32 with gradient, of these targets.
        index: [M] int64, ascending, indices of these targets among those of the batch, such as [0, 1, 5]. Where a loss is by sequence or by
            group, they are all targets of their sequences or groups.
        entropy: [M] float32 of these targets, with gradient, if a loss has an entropy term.
        report: whether metrics are computed, for a batch with one loss that reports metrics of its own, or is over samples of a policy.
    """
    if len(batch.losses) == 1:
        return _one_loss(logprobs, batch, index, batch.losses[0], entropy, report=report)
    loss_ids = batch.ids("loss_ids")[batch.target_sequences[index]]
    # The empty sum gives a row without targets a backward pass, too, in which its rank meets the others.
    losses = torch.zeros_like(logprobs) + logprobs[:0].sum()
    for loss_id in np.unique(loss_ids):
        where = np.flatnonzero(loss_ids == loss_id)
        of_loss = upload(where, logprobs.device)
        own = _one_loss(
            logprobs[of_loss], batch, index[where], batch.losses[loss_id], None if entropy is None else entropy[of_loss], report=False)
        losses = losses.index_copy(0, of_loss, own.losses)
    return TargetLosses(losses)


def _one_loss(logprobs: Tensor, batch: Batch, index: np.ndarray, loss: LossSpec, entropy: Tensor | None, *, report: bool) -> TargetLosses:
    reads = reads_of(loss) + (("prox_logprobs",) if loss.own_samples else ())
    columns = {name: upload(batch.columns[name][index], logprobs.device) for name in ("loss_weights", *reads) if name in batch.columns}
    targets = _targets(logprobs, batch, index, loss, columns)
    is_loss, ref_logprobs = columns["loss_weights"] != 0, columns.get("ref_logprobs")
    weights = constant_weights(targets, loss, m2_mask=columns.get("m2_mask"))
    trained, own_metrics = _trained(targets, loss, is_loss, weights.values), {}
    if is_own(loss.name):
        own = own_losses(loss.name, targets, trained, ref_logprobs=ref_logprobs, entropy=entropy)
        losses, own_metrics = own.losses, own.metrics
    else:
        losses = only(trained, FORMULAS[loss.name].losses(targets, trained))
    if weights.values is not None:
        losses = losses * weights.values
    for term in loss.regularisers:
        values = regulariser(term.kind, targets, is_loss, ref_logprobs=ref_logprobs, entropy=entropy)
        losses = losses + term.coefficient * values
    found = Report()
    if report and loss.name in REPORTS:
        found = REPORTS[loss.name](targets)
    elif report and loss.own_samples and "rollout_logprobs" in batch.columns:
        found = policy_report(targets, loss, weights, ref_logprobs=ref_logprobs)
        found = replace(found, means={**found.means, **{f"own/{name}": values for name, values in own_metrics.items()}})
    elif report and objective_of(loss.name).group:
        found = pair_report(targets, loss, trained)
    return TargetLosses(losses * columns["loss_weights"], found)


def _targets(logprobs: Tensor, batch: Batch, index: np.ndarray, loss: LossSpec, columns: dict[str, Tensor]) -> Targets:
    current, device = logprobs.detach(), logprobs.device
    prox, rollout = columns.get("prox_logprobs", current), columns.get("rollout_logprobs", current)
    anchor = prox if loss.anchor == "prox" else rollout
    if loss.own_samples and loss.anchor == "rollout":
        anchor = torch.where(torch.isfinite(rollout), rollout, current)  # the weights drop such a target
    mask = columns.get("ratio_mask", columns["loss_weights"])
    of_sequence = batch.target_sequences[index]
    names, sequences = np.unique(of_sequence if _needs_sequences(loss) else np.zeros(0, np.int64), return_inverse=True)
    compared: dict[str, Any] = {}
    if objective_of(loss.name).group:
        of_group, groups = np.unique(batch.group_ids[of_sequence], return_inverse=True)
        liked = batch.sequences["signs"][of_sequence] > 0
        compared = {"groups": upload(groups, device), "num_groups": len(of_group), "liked": upload(liked, device)}
        compared |= {"reference": columns["ref_logprobs"]} if "ref_logprobs" in columns else {}
    return Targets(
        logprobs, prox, rollout, anchor, columns.get("advantages", torch.ones_like(current)), mask != 0, upload(sequences, device),
        loss.constants, columns, num_sequences=len(names), **compared)


def _needs_sequences(loss: LossSpec) -> bool:
    by_filter = any(rule.level == "sequence" or rule.metric == "opsm" for rule in loss.filters)
    return objective_of(loss.name).by_sequence or by_filter or (loss.weight is not None and loss.weight.level != "token")


def _trained(targets: Targets, loss: LossSpec, is_loss: Tensor, weights: Tensor | None) -> Tensor:
    """Return [M] bool, the targets whose objective counts."""
    imitates = objective_of(loss.name).imitates
    trained = is_loss if is_own(loss.name) else is_loss & (targets.advantages > 0 if imitates else targets.advantages != 0)
    if "ratio_mask" in objective_of(loss.name).reads:
        trained = trained & targets.counted
    return trained if weights is None else trained & (weights != 0)
