"""What a reward may be, and what stands in its place where it could not be computed.

Reward workers check with `check_reward` what user code returned, and `Trajectory` what a workflow made of it. A failed reward is a NaN that
knows why, so that a workflow may compute with it as with any other: whatever comes of a NaN is not trained on either.
"""

import math
from typing import Any

from offbeat.errors import shorten

LARGEST_REWARD = 1e12
"""Rewards scale gradients, whose squares are summed over all parameters as float32, which ends at 3.4e38."""

_TEXT, _NO_NUMBER_KINDS = (str, bytes, bytearray, memoryview), "SUMmc"


class FailedReward(float):
    """NaN, with the reason for which there is no reward."""

    reason: str

    def __new__(cls, reason: str) -> "FailedReward":
        self = super().__new__(cls, math.nan)
        self.reason = reason
        return self


def check_reward(value: Any) -> float:
    """`value` as a number, or a `FailedReward` that says why it is none that can be trained on.

    Numbers of any kind are taken, also numpy's and torch's without dimensions; text is not, and neither are arrays, even of one element.
    """
    if isinstance(value, FailedReward):
        return value
    try:
        number = _number(value)
    except Exception:  # what a value of user code does when it is looked at
        number = None
    if number is None:
        return FailedReward(f"{shorten(value)} is not a number")
    if not abs(number) <= LARGEST_REWARD:  # also NaN
        return FailedReward(f"{number:g} is not a number within ±{LARGEST_REWARD:g}")
    return number


def _number(value: Any) -> float | None:
    kind = getattr(getattr(value, "dtype", None), "kind", "f")  # numpy's: text, times and complex numbers have a float() of their own
    if isinstance(value, _TEXT) or getattr(value, "ndim", 0) or kind in _NO_NUMBER_KINDS:
        return None
    return float(value)
