"""What a reward may be, and what stands in its place where it could not be computed.

Reward workers check with `check_reward` what user code returned, and `Trajectory` what a workflow made of it. A failed reward is a NaN that
knows why, so that a workflow may compute with it as with any other: whatever comes of a NaN is not trained on either.
"""

import math
from typing import Any

LARGEST_REWARD = 1e18
"""Rewards are squared and stored as float32, which ends at 3.4e38."""


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
    if isinstance(value, str | bytes) or getattr(value, "ndim", 0):
        return FailedReward(f"{_short(value)} is not a number")
    try:
        number = float(value)
    except Exception:
        return FailedReward(f"{_short(value)} is not a number")
    if not abs(number) <= LARGEST_REWARD:  # also NaN
        return FailedReward(f"{number:g} is not a number within ±{LARGEST_REWARD:g}")
    return number


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # user code, too
        text = "it"
    return f"{text[:60]} ({type(value).__name__})"
