"""What counts as a reward, and what replaces one that could not be computed.

Reward workers pass what user code returned to `check_reward`, and `Trajectory` what a workflow made of it. A failed reward is a NaN that
carries its reason, so that a workflow may compute with it as with any number: a NaN that comes of it is not trained on either.
"""

import math
from typing import Any

from offbeat.errors import shorten

LARGEST_REWARD = 1e12
"""Rewards scale gradients, whose squares are summed over all parameters in float32, which ends at 3.4e38."""

_TEXT, _NO_NUMBER_KINDS = (str, bytes, bytearray, memoryview), "SUMmc"


class FailedReward(float):
    """A NaN with the reason why there is no reward."""

    reason: str

    def __new__(cls, reason: str) -> "FailedReward":
        self = super().__new__(cls, math.nan)
        self.reason = reason
        return self


def check_reward(value: Any) -> float:
    """Convert `value` to a number, or to a `FailedReward` that says why it cannot be trained on.

    Numbers of any type are accepted, including those of numpy and torch without dimensions; text is not, and neither are arrays, even of
    one element.
    """
    if isinstance(value, FailedReward):
        return value
    try:
        number = _number(value)
    except Exception:  # a value from user code may raise anything when it is inspected
        number = None
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
