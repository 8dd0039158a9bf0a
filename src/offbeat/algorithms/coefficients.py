"""Coefficients of [algorithm] that change from step to step: of the divergence from the reference, and of the entropy. Torch-free.

The loop keeps one `Coefficients`, trains each step with `applied`, and goes on with `after`. The statistics for `after` are over all ranks,
so all processes of SPMD mode have equal coefficients. Checkpoints hold it.

    kl_target       beta *= 1 + clip(KL / target - 1, -0.2, 0.2) / horizon, for kl_coefficient and reward_kl
    entropy_target  c += step if H <= target, else c -= step, not below 0; acts only while H <= target

KL is the mean of log(behaviour / reference) over the step's trained tokens, and H their mean entropy in the newest training step.

Source: arXiv:1909.08593, whose rate of 0.1 per batch is a horizon of 10 steps; Skywork-OR1, arXiv:2505.22312.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from offbeat.config.algorithms import AlgorithmConfig

KL_METRIC = "policy/kl_rollout_to_ref_k1_mean"
"""Mean of log(behaviour / reference) over a step's trained tokens; there only with kl_target."""

_ENTROPY_METRIC = "train/entropy"
_MAX_ERROR = 0.2


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of the next step.

    Attributes:
        kl_loss, reward_kl, entropy: factors as in [algorithm]: `kl_coefficient`, `reward_kl` and `entropy_coefficient`.
        last_entropy: mean entropy in the newest step, in nats; None before the first.
    """

    kl_loss: float
    reward_kl: float
    entropy: float
    last_entropy: float | None = None

    @classmethod
    def of(cls, config: AlgorithmConfig, saved: "Coefficients | None" = None) -> Self:
        """Return the coefficients to begin with, or to go on with from a checkpoint; those that are not adaptive are as configured."""
        now = cls(config.kl_coefficient, config.reward_kl, config.entropy_coefficient)
        if saved is not None and config.kl_target:
            now = replace(now, kl_loss=saved.kl_loss, reward_kl=saved.reward_kl if config.reward_kl else 0.0)
        if saved is not None and config.entropy_target:
            now = replace(now, entropy=saved.entropy, last_entropy=saved.last_entropy)
        return now

    def applied(self, config: AlgorithmConfig) -> AlgorithmConfig:
        """Return the settings with which the next step trains; the same object if nothing is adaptive."""
        changed: dict[str, float] = {}
        if config.kl_target:
            changed |= {"kl_coefficient": self.kl_loss, "reward_kl": self.reward_kl}
        if config.entropy_target:
            acts = self.last_entropy is None or self.last_entropy <= config.entropy_target
            changed |= {"entropy_coefficient": self.entropy if acts else 0.0}
        return config.model_copy(update=changed) if changed else config

    def after(self, stats: Mapping[str, float], config: AlgorithmConfig) -> Self:
        """Return the coefficients after a step with these metrics of all ranks, such as {"train/entropy": 0.4, "train/tokens": 512.0}.

        A step without tokens changes nothing.
        """
        found = self
        if config.kl_target and KL_METRIC in stats:
            error = min(max(stats[KL_METRIC] / config.kl_target - 1, -_MAX_ERROR), _MAX_ERROR)
            factor = 1 + error / config.kl_horizon
            found = replace(found, kl_loss=found.kl_loss * factor, reward_kl=found.reward_kl * factor)
        if config.entropy_target and stats.get("train/tokens", 0.0) > 0 and _ENTROPY_METRIC in stats:  # not in a critic's warm-up
            entropy = stats[_ENTROPY_METRIC]
            step = config.entropy_step if entropy <= config.entropy_target else -config.entropy_step
            found = replace(found, entropy=max(found.entropy + step, 0.0), last_entropy=entropy)
        return found

    def as_metrics(self, config: AlgorithmConfig) -> dict[str, float]:
        """Return the coefficients that the step trains with, by the names of metrics; none if nothing is adaptive."""
        now = self.applied(config)
        found = {}
        if config.kl_target and config.kl_loss != "none":
            found["train/kl_coefficient"] = now.kl_coefficient
        if config.kl_target and config.reward_kl:
            found["train/reward_kl_coefficient"] = now.reward_kl
        if config.entropy_target:
            found["train/entropy_coefficient"] = now.entropy_coefficient
        return found
