"""The constant weight of each target: its behaviour weight times its filters. Nothing here has a gradient.

With x = prox - rollout, the log-ratio of the policy at the start of the step to the one that sampled; see `WeightSpec` and `FilterSpec` for
the modes, levels and metrics. A filter changes no denominator, as those are in the batch's loss weights.

Source: decoupled PPO, arXiv:2505.24298; binary KL, arXiv:2606.15079; OPSM, arXiv:2512.02556 eq. 9; M2PO, arXiv:2510.01161; Clip-Cov,
arXiv:2505.22617.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.data.batch import FilterSpec, LossSpec, WeightSpec
from offbeat.losses.ratios import MAX_LOG_RATIO, behave_log_ratio, bernoulli_kl, k3_of
from offbeat.losses.targets import Targets


@dataclass(frozen=True, eq=False)
class TargetWeights:
    """Constant weights of M targets.

    Attributes:
        values: [M] float32, at least 0; None if all are 1.
        masked: reason -> [M] bool, the targets that this reason alone drops: "behave", or the metric of a filter.
    """

    values: Tensor | None = None
    masked: dict[str, Tensor] = field(default_factory=dict)


def constant_weights(targets: Targets, loss: LossSpec, *, m2_mask: Tensor | None = None) -> TargetWeights:
    """Compute the weights of a loss's targets; the filter m2 needs `m2_mask` [M], a column of `algorithms.selection.choose_tokens`.

    A run's own sample whose rollout log-probability is not finite is dropped where it cannot be weighed: as the anchor of the ratio, or in
    the mode "ratio"; otherwise it counts as a huge ratio.
    """
    values, masked = None, {}
    if loss.weight is not None:
        values = _behave_weights(targets, loss.weight)
        masked["behave"] = values == 0
    if loss.own_samples and loss.anchor == "rollout":
        unknown = ~torch.isfinite(targets.rollout)
        values = torch.where(unknown, 0.0, torch.ones_like(targets.rollout) if values is None else values)
        masked["behave"] = masked["behave"] | unknown if "behave" in masked else unknown
    for rule in loss.filters:
        dropped = _is_dropped(targets, rule, m2_mask)
        values = torch.where(dropped, 0.0, torch.ones_like(targets.rollout) if values is None else values)
        masked[rule.metric] = masked[rule.metric] | dropped if rule.metric in masked else dropped
    return TargetWeights(values, masked)


def _behave_weights(targets: Targets, spec: WeightSpec) -> Tensor:
    logs = behave_log_ratio(targets.prox, targets.rollout)
    if spec.level != "token":
        logs = targets.over_sequences(logs, "sum" if spec.level == "sequence" else "mean").clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weights = logs.exp()
    if spec.mode == "clamp":
        return weights.clamp(spec.low, spec.high)
    if spec.mode == "mask":
        return torch.where((weights >= spec.low) & (weights <= spec.high), weights, 0.0)
    return torch.where(torch.isfinite(targets.rollout), weights, 0.0)


def _is_dropped(targets: Targets, rule: FilterSpec, m2_mask: Tensor | None) -> Tensor:
    if rule.metric == "m2":
        assert m2_mask is not None, "a filter m2 needs the column m2_mask, from choose_tokens over the whole batch"
        return m2_mask == 0
    if rule.metric == "clip_cov":
        return targets.columns["detach_mask"] == 0
    if rule.metric == "opsm":
        moved = targets.over_sequences(-behave_log_ratio(targets.logprobs.detach(), targets.rollout), "mean")
        return (targets.advantages < 0) & (moved > rule.high)
    logs = behave_log_ratio(targets.prox, targets.rollout)
    match rule.metric:
        case "ratio" | "k1":
            values = logs
        case "k2":
            values = logs.square() / 2
        case "k3":
            values = k3_of(logs)
        case "binary_kl":
            values = torch.maximum(bernoulli_kl(targets.prox, targets.rollout), bernoulli_kl(targets.rollout, targets.prox))
            values = torch.where(torch.isfinite(targets.prox), values, 0.0)
            values = torch.where(torch.isfinite(targets.rollout), values, torch.inf)
        case "tv":
            values = torch.where(torch.isfinite(targets.prox), targets.prox.exp() - targets.rollout.exp(), 0.0)
            values = torch.where(torch.isfinite(targets.rollout), values, torch.inf)
        case unknown:
            raise AssertionError(f"the filter {unknown!r} has no formula")
    if rule.level == "sequence":
        values = targets.over_sequences(values, rule.aggregate)
    if rule.metric == "ratio":
        values = values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ~((values >= rule.low) & (values <= rule.high))
