"""Objectives by name: what the trainer minimises, chosen once when an engine is built.

An `Objective` turns what is known about a micro-batch's tokens into losses and never knows who computed them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from offbeat.algorithms.losses import TokenLosses, cross_entropy, ppo_clip
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.errors import ConfigError


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What is known about M trained tokens, each [M] float32.

    Attributes:
        logprobs: under the current weights, with gradient.
        prox_logprobs: under the weights at the start of the training step.
        rollout_logprobs: under the policy that sampled.
        advantages: one per token.
    """

    logprobs: Tensor
    prox_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor


@dataclass(frozen=True)
class Objective:
    """A loss and what it needs.

    Attributes:
        name: "ppo" or "sft".
        at_temperature: whether log-probabilities are those of the sampling temperature, or of temperature 1.
        needs_prox: whether `prox_logprobs` enter the loss; if not, no forward pass is spent on them.
        loss: micro-batch to token losses.
    """

    name: str
    at_temperature: bool
    needs_prox: bool
    loss: Callable[[LossInputs], TokenLosses]

    def temperature(self, sampling: float) -> float:
        """The temperature of its log-probabilities, given that of the sampling."""
        return sampling if self.at_temperature else 1.0


def _ppo(config: AlgorithmConfig) -> Objective:
    def loss(inputs: LossInputs) -> TokenLosses:
        return ppo_clip(inputs.logprobs, inputs.prox_logprobs, inputs.rollout_logprobs, inputs.advantages, config=config)

    return Objective("ppo", at_temperature=True, needs_prox=True, loss=loss)


def _sft(_config: AlgorithmConfig) -> Objective:
    return Objective("sft", at_temperature=False, needs_prox=False, loss=lambda inputs: cross_entropy(inputs.logprobs))


_OBJECTIVES = {"ppo": _ppo, "sft": _sft}


def objective(name: str, *, config: AlgorithmConfig) -> Objective:
    """The objective called `name`, with the constants of `config`.

    Raises:
        ConfigError: there is no such objective.
    """
    if name not in _OBJECTIVES:
        raise ConfigError(f"the objective must be one of {', '.join(_OBJECTIVES)}, got {name!r}")
    return _OBJECTIVES[name](config)
