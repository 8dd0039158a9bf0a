"""Whether a figure of a long soak grows: a straight line over time, and how sure its slope is. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Point = tuple[float, float]
BLOCK_S = 300.0
"""Rows of so many seconds are averaged, so that the points of the line are nearly independent."""
SETTLED_S = 900.0
"""Before that, a sitting fills its caches."""
SHARE = 0.01
"""A rise over the whole time of less than this share of the figure is none."""


@dataclass(frozen=True)
class Slope:
    """A line through all sittings, each with a level of its own.

    Attributes:
        level: mean of the figure.
        per_hour, low, high: slope in units per hour, and its 95 % interval.
        hours: time that the line covers.
    """

    level: float
    per_hour: float
    low: float
    high: float
    hours: float

    @property
    def grows(self) -> bool:
        """Whether the slope is above 0 beyond chance, and has raised the figure by more than `SHARE`."""
        return self.low > 0 and self.per_hour * self.hours > SHARE * self.level


def slope(sittings: Sequence[Sequence[Point]]) -> Slope | None:
    """The slope of a figure, from points (seconds since the sitting's begin, value); None if they are too few.

    The first `SETTLED_S` of each sitting are left out. For example, 1 MB more every six minutes is 10 MB per hour.
    """
    blocks = [found for points in sittings if len(found := _blocks(points)) > 1]
    count = sum(map(len, blocks))
    if count - len(blocks) < 4:
        return None
    times = np.concatenate([found[:, 0] - found[:, 0].mean() for found in blocks]) / 3600
    values = np.concatenate([found[:, 1] - found[:, 1].mean() for found in blocks])
    spread = float((times**2).sum())
    per_hour = float((times * values).sum()) / spread
    free = count - len(blocks) - 1
    error = math.sqrt(float(((values - per_hour * times) ** 2).sum()) / free / spread)
    margin = (1.96 + 2.4 / free + 2.4 / free**2) * error  # Student's t, to 3 % from 4 degrees of freedom on
    return Slope(
        float(np.concatenate(blocks)[:, 1].mean()), per_hour, per_hour - margin, per_hour + margin, count * BLOCK_S / 3600)


def _blocks(points: Sequence[Point]) -> np.ndarray:
    """[B, 2], mean time and mean value of each block."""
    settled = np.array([point for point in points if point[0] >= SETTLED_S]).reshape(-1, 2)
    numbers = settled[:, 0] // BLOCK_S
    return np.array([settled[numbers == number].mean(0) for number in np.unique(numbers)]).reshape(-1, 2)
