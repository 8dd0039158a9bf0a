"""Valid rewards, and the stand-in for one that could not be computed.

Reward workers check the return value of user code by `check_reward`, and `Trajectory` the rewards of a workflow. A failed reward is a NaN
with its reason, so that a workflow may compute with it as with any number: a NaN as the result is not trained on either. Several rewards by
name, such as {"correct": 1.0, "short": 0.5}, are their sum 1.5, which carries them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from offbeat.config.rollout import reward_name
from offbeat.errors import shorten
from offbeat.user_code.boundary import Caught

RIGHT = 1 - 1e-9
"""An answer of at least this reward counts as right: several rewards that sum to 1 may be rounded."""

LARGEST_REWARD = 1e12
"""Rewards scale gradients, whose squares are summed over all parameters in float32, which ends at 3.4e38."""

JUDGE_PREFIX = "judge:"
"""Marks a `rollout.reward` that is the file of a judge; see `rollout.judges`."""

_OF_GROUP = "scores_groups"
_Reward = TypeVar("_Reward", bound=Callable[..., Any])

_TEXT, _NO_NUMBER_KINDS = (str, bytes, bytearray, memoryview), "SUMmc"


def of_group(reward: _Reward) -> _Reward:
    """Mark a reward that is called once for all completions of a group: `(completions: list[str], row) -> list` of rewards in their order.

    So it can ask about all of them at the same time, or compare them. `rollout.reward_timeout_s` bounds that one call.
    """
    setattr(reward, _OF_GROUP, True)
    return reward


def is_of_group(reward: Callable[..., Any]) -> bool:
    """Return whether `of_group` has marked this reward."""
    return getattr(reward, _OF_GROUP, False) is True


class FailedReward(float):
    """A NaN with the reason why there is no reward."""

    reason: str

    def __new__(cls, reason: str) -> "FailedReward":
        self = super().__new__(cls, math.nan)
        self.reason = reason
        return self


class NamedReward(float):
    """The sum of several rewards, with their values by name."""

    parts: dict[str, float]

    def __new__(cls, parts: Mapping[str, float]) -> "NamedReward":
        self = super().__new__(cls, math.fsum(parts.values()))
        self.parts = dict(parts)
        return self


def weigh(values: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    """Return the weighted sum of several rewards: a `NamedReward` of those that apply, each times its weight.

    It is a `FailedReward` if one of them is, or if none applies.

    Args:
        values: value of each of the rewards in `weights`, by its dotted name; None where it does not apply. The parts of a `NamedReward`
            are named after it, as in "format.short".
    """
    parts: dict[str, float] = {}
    for dotted, value in values.items():
        if isinstance(value, FailedReward):
            return value
        name, weight = reward_name(dotted), weights[dotted]
        if isinstance(value, NamedReward):
            parts |= {f"{name}.{part}": weight * each for part, each in value.parts.items()}
        elif value is not None:
            parts[name] = weight * value
    return NamedReward(parts) if parts else FailedReward("none of the rewards applies: all of them gave None")


def check_reward(value: Any) -> float:
    """Convert `value` to a number, to a `NamedReward` if it is a mapping, or to a `FailedReward` that says why it cannot be trained on.

    Numbers of any type are accepted, such as a numpy or torch scalar without dimensions; text is not, and neither are arrays, even of one
    element. A mapping holds one or more such numbers by name; a None does not apply, and is left out.
    """
    if isinstance(value, FailedReward | NamedReward):
        return value
    if isinstance(value, Mapping):
        return _check_parts(value)
    number = None
    with Caught():  # a value from user code may raise anything when it is inspected
        number = _number(value)
    if number is None:
        return FailedReward(f"{shorten(value)} is not a number")
    if not abs(number) <= LARGEST_REWARD:  # also NaN
        return FailedReward(f"{number:g} is not a number within ±{LARGEST_REWARD:g}")
    return number


def _number(value: Any) -> float | None:
    kind = getattr(getattr(value, "dtype", None), "kind", "f")  # numpy text, times and complex numbers convert to float, too
    if isinstance(value, _TEXT) or getattr(value, "ndim", 0) or kind in _NO_NUMBER_KINDS:
        return None
    return float(value)


def _check_parts(value: Mapping[Any, Any]) -> float:
    parts = {}
    with Caught():  # a mapping of user code may raise anything
        parts = {name: check_reward(part) for name, part in value.items() if part is not None}
    if not parts or not all(isinstance(name, str) for name in parts):
        return FailedReward(f"{shorten(value)} is not a mapping of names to numbers, of which one at least is not None")
    for name, part in parts.items():
        if isinstance(part, FailedReward | NamedReward):
            why = part.reason if isinstance(part, FailedReward) else "a mapping is not a number"
            return FailedReward(f"the reward {name[:60]!r}: {why}")
    return NamedReward(parts)
