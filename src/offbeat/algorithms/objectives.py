"""One table of all losses: what each reads, and which constants it has. The formulas are in `losses`, under the same names. Torch-free.

The controller and the service choose a loss here and put it into their batches as a `LossSpec`; the trainer computes it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.batch import LossSpec
from offbeat.errors import DataError


@dataclass(frozen=True)
class Objective:
    """One kind of loss.

    Attributes:
        reads: columns of the batch, besides `loss_weights`. The trainer computes `prox_logprobs`, under the weights at the start of a step,
            if the step has several updates; with one update they are those of its own forward pass.
        constants: default values by name.
        by_sequence: whether a target's loss depends on the other targets of its sequence.
        at_temperature: whether its log-probabilities are at the sampling temperature; otherwise at temperature 1.
        drops_inputs: whether an adapter's dropout applies. A ratio compares the policy with the one that sampled, and neither uses dropout.
    """

    reads: tuple[str, ...] = ()
    constants: Mapping[str, float | str] = field(default_factory=dict)
    by_sequence: bool = False
    at_temperature: bool = False
    drops_inputs: bool = False


_POLICY = ("rollout_logprobs", "advantages")
OBJECTIVES: Mapping[str, Objective] = MappingProxyType({
    "cross_entropy": Objective(drops_inputs=True),
    "importance_sampling": Objective(_POLICY),
    "ppo": Objective(_POLICY, {"clip_low": 0.8, "clip_high": 1.2}),
    "cispo": Objective(_POLICY, {"clip_low": 0.0, "clip_high": 4.0}),
    "dro": Objective(_POLICY, {"beta": 0.05}),
    # The paper's range is 0.9997 to 1.0004; PPO's, which users expect, stops only steps that went far astray.
    "gspo": Objective((*_POLICY, "ratio_mask"), {"clip_low": 0.8, "clip_high": 1.2}, by_sequence=True),
    "decoupled_ppo": Objective(
        (*_POLICY, "prox_logprobs"),
        {"clip_low": 0.8, "clip_high": 1.2, "dual_clip": 0.0, "behave_weight": "mask", "behave_cap": 5.0}, at_temperature=True),
})
"""All losses by name. Bounds of a ratio are absolute: `clip_low` and `clip_high` are the smallest and the largest unclipped ratio."""

CLIENT_LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
"""Losses that clients of the service may ask for."""

CROSS_ENTROPY = LossSpec("cross_entropy")


def policy_loss(config: AlgorithmConfig) -> LossSpec:
    """Return the loss of reinforcement learning that [algorithm] describes."""
    return LossSpec("decoupled_ppo", {
        "clip_low": 1.0 - config.clip_low, "clip_high": 1.0 + config.clip_high, "dual_clip": config.dual_clip,
        "behave_weight": config.weight, "behave_cap": config.weight_high})


def client_loss(name: str, **constants: float) -> LossSpec:
    """Return a loss with its default constants, except those given.

    Raises:
        DataError: clients cannot ask for such a loss, or it has no such constant, or a value is out of bounds.
    """
    if name not in CLIENT_LOSSES:
        raise DataError(f"there is no loss {name[:80]!r}; use one of {', '.join(CLIENT_LOSSES)}")
    known = OBJECTIVES[name].constants
    if unknown := constants.keys() - known.keys():
        raise DataError(f"the loss {name} has no constant {min(unknown)[:80]!r}; it has {', '.join(known) or 'none'}")
    values = {**known, **constants}
    low, high, beta = (float(values.get(constant, 0.0)) for constant in ("clip_low", "clip_high", "beta"))
    if not 0 <= low <= high < math.inf:
        raise DataError(f"the bounds of the ratio in {name} must be finite with 0 <= low <= high, got {low} and {high}")
    if not 0 <= beta < math.inf:
        raise DataError(f"beta of {name} must be finite and at least 0, got {beta}")
    return LossSpec(name, values)
