"""The losses of a `DatumBatch`, per target: plain sums, with no denominator anywhere. Called by the trainer for each micro-batch.

With lp the trained log-probability, q `rollout_logprobs`, A `advantages`, r = exp(lp - q) and sg what has no gradient:

    cross_entropy        -weights * lp
    importance_sampling  -r * A
    ppo                  -min(r * A, clip(r) * A)
    cispo                -sg(clip(r)) * lp * A
    dro                  -(lp * A - beta / 2 * (lp - q)^2)
    gspo                 -min(s_t * A, clip(s_t) * A), s_t = sg(s) * exp(lp - sg(lp)), s = exp(mean of lp - q over the ratio mask)

A target whose weight or advantage is 0, or that is outside of gspo's mask, adds exactly 0 to loss and gradient, whatever else it holds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from offbeat.data.datums import DatumBatch, LossSpec

_MAX_LOG_RATIO = 80.0
"""exp of it is near the largest float32: beyond, a ratio is taken as this, and 0 * inf stays out of the backward pass."""


@dataclass(frozen=True, eq=False)
class _Targets:
    """Those of one loss. All [M]; `sequences` are in 0 .. num_sequences - 1."""

    weights: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    ratio_mask: Tensor
    sequences: Tensor
    num_sequences: int

    @classmethod
    def of(cls, batch: DatumBatch, where: np.ndarray, device: torch.device) -> Self:
        def pick(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values[where]).to(device)

        return cls(
            pick(batch.weights), pick(batch.rollout_logprobs), pick(batch.advantages), pick(batch.ratio_mask),
            pick(batch.target_sequences), len(batch))


def datum_losses(logprobs: Tensor, batch: DatumBatch) -> Tensor:
    """The loss of each target by its sequence's own formula.

    Args:
        logprobs: [M] float32 with gradient, of the batch's targets.

    Returns:
        [M] float32 with gradient.

    Source: cispo, arXiv:2506.13585; dro, arXiv:2405.19107; gspo, arXiv:2507.18071 (its token variant).
    """
    loss_ids = batch.loss_ids[batch.target_sequences]
    losses = torch.zeros_like(logprobs)
    for loss_id in np.unique(loss_ids):
        where = np.flatnonzero(loss_ids == loss_id)
        index, spec = torch.from_numpy(where).to(logprobs.device), batch.losses[loss_id]
        own = _FORMULAS[spec.name](logprobs[index], _Targets.of(batch, where, logprobs.device), spec)
        losses = losses.index_copy(0, index, own)
    return losses


def _cross_entropy(logprobs: Tensor, targets: _Targets, _spec: LossSpec) -> Tensor:
    return -targets.weights * _only(targets.weights != 0, logprobs)


def _importance_sampling(logprobs: Tensor, targets: _Targets, _spec: LossSpec) -> Tensor:
    return -_ratios(logprobs, targets) * targets.advantages


def _ppo(logprobs: Tensor, targets: _Targets, spec: LossSpec) -> Tensor:
    return _clipped(_ratios(logprobs, targets), targets.advantages, spec)


def _cispo(logprobs: Tensor, targets: _Targets, spec: LossSpec) -> Tensor:
    ratios = _ratios(logprobs, targets).detach().clamp(spec.clip_low, spec.clip_high)
    return -ratios * _only(targets.advantages != 0, logprobs) * targets.advantages


def _dro(logprobs: Tensor, targets: _Targets, spec: LossSpec) -> Tensor:
    trained = targets.advantages != 0
    gap = _only(trained, logprobs - targets.rollout_logprobs)
    return -(_only(trained, logprobs) * targets.advantages - spec.beta / 2 * gap.square())


def _gspo(logprobs: Tensor, targets: _Targets, spec: LossSpec) -> Tensor:
    mask = targets.ratio_mask
    gaps = _only(mask, (logprobs - targets.rollout_logprobs).detach())
    zeros = gaps.new_zeros(targets.num_sequences)
    sums = zeros.index_add(0, targets.sequences, gaps)
    counts = zeros.index_add(0, targets.sequences, mask.to(gaps.dtype))
    means = (sums / counts.clamp(min=1)).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    own = _only(mask & (targets.advantages != 0), logprobs)
    return _clipped(means.exp()[targets.sequences] * (own - own.detach()).exp(), _only(mask, targets.advantages), spec)


def _ratios(logprobs: Tensor, targets: _Targets) -> Tensor:
    """r; 1 where the advantage is 0."""
    gap = _only(targets.advantages != 0, logprobs - targets.rollout_logprobs)
    return gap.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _clipped(ratios: Tensor, advantages: Tensor, spec: LossSpec) -> Tensor:
    return -torch.minimum(ratios * advantages, ratios.clamp(spec.clip_low, spec.clip_high) * advantages)


def _only(condition: Tensor, values: Tensor) -> Tensor:
    """The values where the condition holds, else 0 with no gradient, even where a value is not finite."""
    return torch.where(condition, values, 0.0)


_FORMULAS: dict[str, Callable[[Tensor, _Targets, LossSpec], Tensor]] = {
    "cross_entropy": _cross_entropy, "importance_sampling": _importance_sampling, "ppo": _ppo, "cispo": _cispo, "dro": _dro, "gspo": _gspo}
