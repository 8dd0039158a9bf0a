"""Objectives: the loss of each target before its weight, by the names of `offbeat.config.objectives.OBJECTIVES`.

With lp the trained log-probability, q the anchor, A the advantage, r = exp(lp - q), and sg the stop of the gradient:

    cross_entropy        -lp
    reinforce            -lp * A
    importance_sampling  -r * A
    ppo                  -min(r * A, clip(r) * A), at most dual_clip * |A| where A < 0
    cispo                -sg(clip(r)) * lp * A
    dro                  -(lp * A - beta / 2 * (lp - q)^2)
    gspo                 -min(s_t * A, clip(s_t) * A), s_t = sg(s) * exp(lp - sg(lp)), s = exp(mean of lp - q over the sequence)
    sapo                 -(4 / tau) * sigmoid(tau * (r - 1)) * A, with tau_high where A > 0, else tau_low
    gmpo                 -exp(mean of x over the sequence) * A, x = min(lp - q, clip_high) where A > 0, else max(lp - q, -clip_low)
    dppo                 -r * A, and 0 where A and the move from q to lp have one sign and the divergence is above clip_high or clip_low
    forward_kl           q * (log q - lp), q the teacher's probability of the target, one of several targets at a position
    reverse_kl           p * (log p - log q) + (q - p) * (1 - log q_least), p = exp(lp), q_least the lowest q of these targets
    value                max((v - R)^2, (old + clip(v - old) - R)^2) / 2, with v the value, old the value before the update, R the return

Objectives of preference pairs are in `losses.pairs`. Only `trained` targets count; all others have the loss 0 without gradient, whatever
their values are. No denominator is applied: those are in the batch's loss weights.

Source: PPO, arXiv:1707.06347; dual clip, arXiv:1912.09729; cispo, arXiv:2506.13585; dro, arXiv:2405.19107; gspo, arXiv:2507.18071 (its
token variant); sapo, arXiv:2511.20347; gmpo, arXiv:2507.20673; dppo, arXiv:2602.04879; forward_kl and reverse_kl,
arXiv:2306.13649; value with a clip, arXiv:2005.12729.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from offbeat.losses import pairs
from offbeat.losses.ratios import MAX_LOG_RATIO, bernoulli_kl, current_log_ratio
from offbeat.losses.targets import Targets, only


def cross_entropy(targets: Targets, trained: Tensor) -> Tensor:
    """Compute the negative log-likelihood, [M]."""
    return -only(trained, targets.logprobs)


def reinforce(targets: Targets, trained: Tensor) -> Tensor:
    """Compute the policy gradient loss, [M]."""
    return -only(trained, targets.logprobs) * targets.advantages


def importance_sampling(targets: Targets, trained: Tensor) -> Tensor:
    """Compute the policy gradient loss [M], weighted by the ratio."""
    return -_ratios(targets, trained) * targets.advantages


def ppo(targets: Targets, trained: Tensor) -> Tensor:
    """Compute PPO-clip [M], with an optional bound on targets of negative advantage."""
    losses = _clipped(_ratios(targets, trained), targets)
    if dual_clip := targets.constants.get("dual_clip"):
        losses = torch.minimum(losses, _dual_bound(targets, dual_clip))
    return losses


def cispo(targets: Targets, trained: Tensor) -> Tensor:
    """Compute the policy gradient loss [M], weighted by the clipped ratio as a constant."""
    ratios = _clip(_ratios(targets, trained).detach(), targets)
    return -ratios * only(trained, targets.logprobs) * targets.advantages


def dro(targets: Targets, trained: Tensor) -> Tensor:
    """Compute the policy gradient loss [M] with a squared penalty on the change of log-probabilities."""
    gap = only(trained, targets.logprobs - targets.anchor)
    return -(only(trained, targets.logprobs) * targets.advantages - targets.constants["beta"] / 2 * gap.square())


def gspo(targets: Targets, trained: Tensor) -> Tensor:
    """Compute PPO-clip [M] with one ratio for a whole sequence, whose gradient is spread over its targets."""
    own = only(trained, targets.logprobs)
    return _clipped(_sequence_ratios(targets) * (own - own.detach()).exp(), targets)


def sapo(targets: Targets, trained: Tensor) -> Tensor:
    """Compute the policy gradient loss [M] through a smooth gate, whose slope is 1 at a ratio of 1."""
    tau = _tau(targets)
    return -(4 / tau) * torch.sigmoid(tau * (_ratios(targets, trained) - 1)) * targets.advantages


def gmpo(targets: Targets, trained: Tensor) -> Tensor:
    """Compute the policy gradient loss [M], weighted by the geometric mean of a sequence's clipped ratios; equal for all its targets."""
    gaps = current_log_ratio(targets.logprobs, targets.anchor)
    gaps = torch.where(trained, gaps, gaps.detach())
    low, high = targets.constants["clip_low"], targets.constants["clip_high"]
    clipped = torch.where(targets.advantages > 0, gaps.clamp(max=high), gaps.clamp(min=-low))
    return -only(trained, targets.over_sequences(clipped, "mean").exp()) * targets.advantages


def dppo(targets: Targets, trained: Tensor) -> Tensor:
    """Compute the policy gradient loss [M], weighted by the ratio; 0 where a probability has moved far in the wanted direction."""
    low, high = _diverged(targets)
    return -only(~(low | high), _ratios(targets, trained)) * targets.advantages


def forward_kl(targets: Targets, trained: Tensor) -> Tensor:
    """Compute each target's summand of KL(teacher || current), [M]."""
    teacher = only(trained, targets.columns["teacher_logprobs"])
    return teacher.exp() * (teacher - only(trained, targets.logprobs))


def reverse_kl(targets: Targets, trained: Tensor) -> Tensor:
    """Compute each target's summand of KL(current || teacher), [M]; the target is one of K at a position.

    The second term charges 1 - log q_least for all probability outside the K tokens, so nothing if they are all there are. Without it
    the minimum would be at p = q / e; with it, it is at p = q.
    """
    own, teacher, least = (
        only(trained, values) for values in (targets.logprobs, targets.columns["teacher_logprobs"], targets.columns["teacher_least"]))
    return own.exp() * (own - teacher) + (teacher.exp() - own.exp()) * (1 - least)


def value(targets: Targets, trained: Tensor) -> Tensor:
    """Compute half the squared error [M] of a critic's values, which replace log-probabilities; a move past `clip` is no gain."""
    returns = targets.columns["returns"]
    values = only(trained, targets.logprobs)
    errors = only(trained, values - returns).square()
    if clip := targets.constants["clip"]:
        old = only(trained, targets.columns["values"])
        errors = torch.maximum(errors, only(trained, old + (values - old).clamp(-clip, clip) - returns).square())
    return errors / 2


@dataclass(frozen=True, eq=False)
class Clips:
    """Targets that an objective clips, [M] bool each: in any way, at its lower bound, and at its upper one.

    A clip removes the gradient, except cispo's, which bounds the weight. The dual clip counts only in `any`.
    """

    any: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def none(cls, targets: Targets) -> "Clips":
        """Return the clips of an objective without bounds, three times [M] False."""
        nothing = torch.zeros_like(targets.advantages, dtype=torch.bool)
        return cls(nothing, nothing, nothing)

    @classmethod
    def of(cls, low: Tensor, high: Tensor) -> "Clips":
        """Return clips at two bounds, [M] bool each."""
        return cls(low | high, low, high)


def _gates(targets: Targets) -> Tensor:
    """Return [M] slopes of sapo's gate: the share of the importance-sampling gradient that passes."""
    tau = _tau(targets)
    gate = torch.sigmoid(tau * (plain_ratios(targets) - 1))
    return 4 * gate * (1 - gate)


def _cispo_clips(targets: Targets) -> Clips:
    ratios = plain_ratios(targets)
    return Clips.of(ratios < targets.constants["clip_low"], ratios > targets.constants["clip_high"])


def _gmpo_clips(targets: Targets) -> Clips:
    gaps, advantages = current_log_ratio(targets.logprobs, targets.anchor), targets.advantages
    low, high = gaps < -targets.constants["clip_low"], gaps > targets.constants["clip_high"]
    return Clips.of(low & (advantages < 0), high & (advantages > 0))


def _removed(ratios: Tensor, targets: Targets) -> Clips:
    """Return the targets whose gradient PPO's clip of these [M] ratios removes."""
    advantages = targets.advantages
    free, clipped = -ratios * advantages, -_clip(ratios, targets) * advantages
    removed = clipped > free
    found = Clips.of(removed & (advantages < 0), removed & (advantages > 0))
    if dual_clip := targets.constants.get("dual_clip"):
        return replace(found, any=removed | (torch.maximum(free, clipped) > _dual_bound(targets, dual_clip)))
    return found


@torch.no_grad()
def plain_ratios(targets: Targets) -> Tensor:
    """Return [M] ratios of current policy to anchor of all targets, without gradient."""
    return current_log_ratio(targets.logprobs, targets.anchor).exp()


def _ratios(targets: Targets, trained: Tensor) -> Tensor:
    """Return [M] ratios r, 1 for targets that are not trained."""
    return only(trained, current_log_ratio(targets.logprobs, targets.anchor)).exp()


def _sequence_ratios(targets: Targets) -> Tensor:
    gaps = (targets.logprobs - targets.anchor).detach()
    return targets.over_sequences(gaps, "mean").clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clip(ratios: Tensor, targets: Targets) -> Tensor:
    return ratios.clamp(targets.constants["clip_low"], targets.constants["clip_high"])


def _clipped(ratios: Tensor, targets: Targets) -> Tensor:
    return -torch.minimum(ratios * targets.advantages, _clip(ratios, targets) * targets.advantages)


def _dual_bound(targets: Targets, dual_clip: float) -> Tensor:
    return torch.where(targets.advantages < 0, -dual_clip * targets.advantages, torch.inf)


def _tau(targets: Targets) -> Tensor:
    tau = torch.full_like(targets.advantages, targets.constants["tau_low"])
    return torch.where(targets.advantages > 0, targets.constants["tau_high"], tau)


@torch.no_grad()
def _diverged(targets: Targets) -> tuple[Tensor, Tensor]:
    """Return 2 x [M] bool: targets of negative and of positive advantage that have moved too far down or up.

    A target whose log-probability is not finite is among neither, so that it reaches the loss.
    """
    logprobs, anchor, advantages = torch.where(targets.logprobs.isinf(), torch.nan, targets.logprobs), targets.anchor, targets.advantages
    tv = targets.constants["divergence"] == "tv"
    divergence = (logprobs.exp() - anchor.exp()).abs() if tv else bernoulli_kl(anchor, logprobs)
    down = (advantages < 0) & (logprobs < anchor) & (divergence > targets.constants["clip_low"])
    return down, (advantages > 0) & (logprobs > anchor) & (divergence > targets.constants["clip_high"])


@dataclass(frozen=True)
class Formula:
    """The formula of an objective, and its metrics in a step over a run's samples, without gradient.

    Attributes:
        losses: function of M targets and [M] bool, which of them are trained; returns [M] losses with gradient.
        clips: the targets that it clips; None if it has no bounds.
        metrics: further [M] values of all targets by name, such as "gate", whose mean is reported as `policy/gate_mean`.
    """

    losses: Callable[[Targets, Tensor], Tensor]
    clips: Callable[[Targets], Clips] | None = None
    metrics: Mapping[str, Callable[[Targets], Tensor]] = field(default_factory=dict)


FORMULAS: Mapping[str, Formula] = MappingProxyType({
    "cross_entropy": Formula(cross_entropy),
    "reinforce": Formula(reinforce),
    "importance_sampling": Formula(importance_sampling),
    "ppo": Formula(ppo, lambda targets: _removed(plain_ratios(targets), targets)),
    "cispo": Formula(cispo, _cispo_clips),
    "dro": Formula(dro),
    "gspo": Formula(gspo, lambda targets: _removed(_sequence_ratios(targets), targets)),
    "sapo": Formula(sapo, metrics={"gate": _gates}),
    "gmpo": Formula(gmpo, _gmpo_clips),
    "dppo": Formula(dppo, lambda targets: Clips.of(*_diverged(targets))),
    "forward_kl": Formula(forward_kl),
    "reverse_kl": Formula(reverse_kl),
    "value": Formula(value),
    "bradley_terry": Formula(pairs.bradley_terry),
    **{name: Formula(losses) for name, losses in pairs.OF_PAIRS.items()}})
"""All formulas, by the names of `config.objectives.OBJECTIVES`."""
