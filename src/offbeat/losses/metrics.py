"""Metrics of one step over a run's samples, by name; `trainer.stats.merge` describes every one. No gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from offbeat.algorithms.objectives import first_of
from offbeat.config.objectives import OBJECTIVES, is_own
from offbeat.data.batch import LossSpec
from offbeat.losses.objectives import FORMULAS, Clips, plain_ratios
from offbeat.losses.pairs import compare, margins
from offbeat.losses.ratios import k3, k3_of, log_ratio
from offbeat.losses.targets import Targets
from offbeat.losses.weights import TargetWeights


@dataclass(frozen=True, eq=False)
class Report:
    """Values of M targets, [M] each by the name of a metric, whose mean, minimum or maximum over all targets is reported.

    `groups` has values [G] of G groups and a mask [G] bool, such as the groups with a chosen answer, over which their mean is reported.
    """

    means: dict[str, Tensor] = field(default_factory=dict)
    minima: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    groups: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@torch.no_grad()
def policy_report(targets: Targets, loss: LossSpec, weights: TargetWeights, *, ref_logprobs: Tensor | None) -> Report:
    """Compute the metrics of a loss; `ref_logprobs` are [M] float32 if the loss reads them."""
    logprobs, prox, rollout = targets.logprobs.detach(), targets.prox, targets.rollout
    ratios = plain_ratios(targets)
    formula = None if is_own(loss.name) else FORMULAS[loss.name]
    clips = formula.clips(targets) if formula and formula.clips else Clips.none(targets)
    drift, gap = log_ratio(logprobs, rollout), (prox - rollout).abs()
    values = torch.ones_like(rollout) if weights.values is None else weights.values
    rollout_kl = k3_of(drift)
    nothing = torch.zeros_like(rollout, dtype=torch.bool)
    means = {
        "train/clip_fraction": clips.any,
        "train/clip_low_fraction": clips.low,
        "train/clip_high_fraction": clips.high,
        "policy/ratio_mean": ratios,
        "policy/kl_mean": rollout_kl,
        "policy/kl_rollout_to_current_k1_mean": -drift,
        "policy/kl_rollout_to_current_k3_mean": rollout_kl,
        "policy/kl_rollout_to_prox_k3_mean": k3(prox, rollout),
        "policy/behave_masked_fraction": weights.masked.get("behave", nothing),
        **{f"policy/{reason}_masked_fraction": dropped for reason, dropped in weights.masked.items()},
        "policy/masked_fraction": values == 0,
        "policy/weight_mean": values,
        "policy/weight_square_mean": values.square(),
        "policy/logprob_gap_mean": gap,
    }
    if formula is not None:
        means |= {f"policy/{name}_mean": values(targets) for name, values in formula.metrics.items()}
    if ref_logprobs is not None:
        distance = log_ratio(logprobs, ref_logprobs)
        means["policy/kl_current_to_ref_k1_mean"] = distance
        means["policy/kl_current_to_ref_k3_mean"] = k3_of(-distance)
    maxima = {"policy/ratio_max": ratios, "policy/weight_max": values, "policy/logprob_gap_max": gap}
    return Report(means, {"policy/ratio_min": ratios}, maxima)


@torch.no_grad()
def value_report(targets: Targets) -> Report:
    """Compute the metrics of a critic, before its update; from the second moments `trainer.stats.merge` makes the explained variance."""
    values, returns = targets.logprobs.detach(), targets.columns["returns"]
    errors = returns - values
    moved = (values - targets.columns["values"]).abs()
    clip = targets.constants["clip"]
    return Report({
        "critic/value_mean": values, "critic/return_mean": returns, "critic/return_square_mean": returns.square(),
        "critic/error_mean": errors, "critic/error_square_mean": errors.square(),
        "critic/clip_fraction": moved > clip if clip else torch.zeros_like(moved, dtype=torch.bool)})


@torch.no_grad()
def pair_report(targets: Targets, loss: LossSpec, trained: Tensor) -> Report:
    """Compute the metrics of a loss of preference pairs; a mix reports the metrics of its first loss. `trained` is [M] bool."""
    loss = first_of(loss)
    targets = replace(targets, constants=loss.constants)
    found = compare(loss.name, targets, trained)
    margin, compared = margins(loss.name, found, targets), found.has_chosen | found.has_rejected
    what = "logratio" if OBJECTIVES[loss.name].refers else "logprob"
    return Report(groups={
        "preference/accuracy": (margin > 0, compared),
        "preference/margin_mean": (margin, compared),
        f"preference/chosen_{what}_mean": (found.chosen, found.has_chosen),
        f"preference/rejected_{what}_mean": (found.rejected, found.has_rejected),
    })


@torch.no_grad()
def reward_report(targets: Targets) -> Report:
    """Compute the metrics of a reward model, before its update."""
    found = compare("bradley_terry", targets, targets.counted)
    margin, everywhere = found.chosen - found.rejected, torch.ones_like(found.has_chosen)
    return Report(groups={
        "reward_model/accuracy": (margin > 0, everywhere), "reward_model/margin_mean": (margin, everywhere),
        "reward_model/reward_mean": ((found.chosen + found.rejected) / 2, everywhere)})


REPORTS: Mapping[str, Callable[[Targets], Report]] = MappingProxyType({"value": value_report, "bradley_terry": reward_report})
"""Metrics of losses that are not over samples of a policy, by the name of the objective."""
