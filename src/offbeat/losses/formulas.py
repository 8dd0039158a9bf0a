"""Losses per target, by the names of `objectives.OBJECTIVES`. Called by the trainer for each micro-batch.

With lp the trained log-probability, q `rollout_logprobs`, A `advantages`, r = exp(lp - q), and sg the stop of the gradient:

    cross_entropy        -lp
    importance_sampling  -r * A
    ppo                  -min(r * A, clip(r) * A)
    cispo                -sg(clip(r)) * lp * A
    dro                  -(lp * A - beta / 2 * (lp - q)^2)
    gspo                 -min(s_t * A, clip(s_t) * A), s_t = sg(s) * exp(lp - sg(lp)), s = exp(mean of lp - q over the ratio mask)
    decoupled_ppo        see `decoupled_ppo`

`target_losses` multiplies them by `loss_weights`, which hold all denominators; none is applied here. In the first six, a target whose
weight or advantage is 0, or that is outside gspo's mask, adds exactly 0 to loss and gradient, whatever its other values are.

Source: cispo, arXiv:2506.13585; dro, arXiv:2405.19107; gspo, arXiv:2507.18071 (its token variant); decoupled PPO, arXiv:2505.24298.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.algorithms.objectives import OBJECTIVES
from offbeat.data.batch import Batch, LossSpec
from offbeat.losses.ratios import MAX_LOG_RATIO, behave_weights, k3


@dataclass(frozen=True, eq=False)
class TargetLosses:
    """Losses of M targets, and values to report.

    Attributes:
        losses: [M] float32 with gradient.
        means: metric name -> [M], values whose mean over all targets is reported; without gradient.
        maxima: metric name -> [M], values whose maximum is reported; without gradient.
    """

    losses: Tensor
    means: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Targets:
    """Inputs of a formula: M targets of one loss.

    Attributes:
        logprobs: [M] float32 with gradient.
        columns: `loss_weights` and the columns that the loss reads, [M] float32 each; `prox_logprobs` may be missing.
        constants: constants of the loss.
        sequences: [M] int64, ascending from 0, the sequence of each target; empty for losses that are not `by_sequence`.
    """

    logprobs: Tensor
    columns: Mapping[str, Tensor]
    constants: Mapping[str, Any]
    sequences: Tensor

    @property
    def rollout_logprobs(self) -> Tensor:
        return self.columns["rollout_logprobs"]

    @property
    def advantages(self) -> Tensor:
        return self.columns["advantages"]

    @property
    def prox_logprobs(self) -> Tensor:
        """[M] float32, those of this pass if the batch has none."""
        prox = self.columns.get("prox_logprobs")
        return self.logprobs.detach() if prox is None else prox


def target_losses(logprobs: Tensor, batch: Batch, index: np.ndarray) -> TargetLosses:
    """Compute the losses of some targets, each by its sequence's own formula, multiplied by loss weights.

    Args:
        logprobs: [m] float32 with gradient, of these targets.
        batch: has the columns that its losses read.
        index: [m] int64, ascending, indices of these targets among the batch's M.

    Returns:
        [m] losses; values to report are left out if the batch has several losses.
    """
    if len(batch.losses) == 1:
        return _one_loss(logprobs, batch, index, batch.losses[0])
    loss_ids = batch.ids("loss_ids")[batch.target_sequences[index]]
    # The empty sum gives a row without targets a backward pass, too, in which its rank meets the others.
    losses = torch.zeros_like(logprobs) + logprobs[:0].sum()
    for loss_id in np.unique(loss_ids):
        where = np.flatnonzero(loss_ids == loss_id)
        of_loss = torch.from_numpy(where).to(logprobs.device)
        own = _one_loss(logprobs[of_loss], batch, index[where], batch.losses[loss_id]).losses
        losses = losses.index_copy(0, of_loss, own)
    return TargetLosses(losses)


def _one_loss(logprobs: Tensor, batch: Batch, index: np.ndarray, spec: LossSpec) -> TargetLosses:
    chosen = OBJECTIVES[spec.name]
    columns = {
        name: torch.from_numpy(batch.columns[name][index]).to(logprobs.device)
        for name in ("loss_weights", *chosen.reads) if name in batch.columns}
    sequences = batch.target_sequences[index] if chosen.by_sequence else np.zeros(0, np.int64)
    sequences = torch.from_numpy(np.unique(sequences, return_inverse=True)[1]).to(logprobs.device)
    found = FORMULAS[spec.name](Targets(logprobs, columns, spec.constants, sequences))
    return TargetLosses(found.losses * columns["loss_weights"], found.means, found.maxima)


def cross_entropy(targets: Targets) -> TargetLosses:
    """Compute the negative log-likelihood."""
    return TargetLosses(-_only(targets.columns["loss_weights"] != 0, targets.logprobs))


def importance_sampling(targets: Targets) -> TargetLosses:
    """Compute the policy gradient loss, weighted by the ratio to the policy that sampled."""
    return TargetLosses(-_ratios(targets) * targets.advantages)


def ppo(targets: Targets) -> TargetLosses:
    """Compute PPO-clip, with the ratio to the policy that sampled."""
    return _clipped(_ratios(targets), targets.advantages, targets)


def cispo(targets: Targets) -> TargetLosses:
    """Compute the policy gradient loss, weighted by the clipped ratio as a constant."""
    ratios = _clip(_ratios(targets).detach(), targets)
    return TargetLosses(-ratios * _only(targets.advantages != 0, targets.logprobs) * targets.advantages)


def dro(targets: Targets) -> TargetLosses:
    """Compute the policy gradient loss with a squared penalty on how far log-probabilities have moved."""
    trained = targets.advantages != 0
    gap = _only(trained, targets.logprobs - targets.rollout_logprobs)
    return TargetLosses(
        -(_only(trained, targets.logprobs) * targets.advantages - targets.constants["beta"] / 2 * gap.square()))


def gspo(targets: Targets) -> TargetLosses:
    """Compute PPO-clip with one ratio for a whole sequence, whose gradient is spread over its targets."""
    mask = targets.columns["ratio_mask"] != 0
    gaps = _only(mask, (targets.logprobs - targets.rollout_logprobs).detach())
    zeros = gaps.new_zeros(int(targets.sequences.max()) + 1 if len(gaps) else 0)
    sums = zeros.index_add(0, targets.sequences, gaps)
    counts = zeros.index_add(0, targets.sequences, mask.to(gaps.dtype))
    means = (sums / counts.clamp(min=1)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    own = _only(mask & (targets.advantages != 0), targets.logprobs)
    return _clipped(means.exp()[targets.sequences] * (own - own.detach()).exp(), _only(mask, targets.advantages), targets)


def decoupled_ppo(targets: Targets) -> TargetLosses:
    """Compute decoupled PPO-clip, with an optional bound on targets of negative advantage.

        r = exp(logprobs - prox_logprobs)
        loss = -min(r * A, clip(r) * A), at most dual_clip * |A| where A < 0
        loss *= behaviour weight, a constant

    Returns:
        Losses, and metrics by name: `train/clip_fraction` (tokens whose gradient the clip removed), `policy/ratio_mean` (of r),
        `policy/kl_mean` (k3 of rollout to current policy), `policy/behave_masked_fraction` (tokens dropped for their behaviour weight),
        `policy/logprob_gap_mean` and `_max` (|prox_logprobs - rollout_logprobs|).

    Source: decoupled PPO, arXiv:2505.24298; dual clip, arXiv:1912.09729.
    """
    logprobs, prox, rollout, advantages = targets.logprobs, targets.prox_logprobs, targets.rollout_logprobs, targets.advantages
    # Not `log_ratio`: a log-probability that is not finite must reach the loss, where the trainer sees it and skips the step.
    ratios = (logprobs - prox).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free = -ratios * advantages
    clipped = -_clip(ratios, targets) * advantages
    losses = torch.maximum(free, clipped)
    removed = (clipped > free).detach()
    if dual_clip := targets.constants["dual_clip"]:
        bound = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        removed = removed | (losses > bound)
        losses = torch.minimum(losses, bound)
    weights = behave_weights(prox, rollout, mode=targets.constants["behave_weight"], cap=targets.constants["behave_cap"])
    gap = (prox - rollout).abs()
    means = {
        "train/clip_fraction": removed,
        "policy/ratio_mean": ratios.detach(),
        "policy/kl_mean": k3(logprobs.detach(), rollout),
        "policy/behave_masked_fraction": weights == 0,
        "policy/logprob_gap_mean": gap,
    }
    return TargetLosses(losses * weights, means, {"policy/logprob_gap_max": gap})


def _ratios(targets: Targets) -> Tensor:
    """Return [M] ratios r, 1 where the advantage is 0."""
    gap = _only(targets.advantages != 0, targets.logprobs - targets.rollout_logprobs)
    return gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clip(ratios: Tensor, targets: Targets) -> Tensor:
    return ratios.clamp(targets.constants["clip_low"], targets.constants["clip_high"])


def _clipped(ratios: Tensor, advantages: Tensor, targets: Targets) -> TargetLosses:
    return TargetLosses(-torch.minimum(ratios * advantages, _clip(ratios, targets) * advantages))


def _only(condition: Tensor, values: Tensor) -> Tensor:
    """Return the values where the condition holds, else 0 without gradient, even where a value is not finite."""
    return torch.where(condition, values, 0.0)


FORMULAS: dict[str, Callable[[Targets], TargetLosses]] = {
    "cross_entropy": cross_entropy, "importance_sampling": importance_sampling, "ppo": ppo, "cispo": cispo, "dro": dro, "gspo": gspo,
    "decoupled_ppo": decoupled_ppo}
