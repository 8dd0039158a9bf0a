"""Estimates how long the rest of a run takes, and writes durations for people. Called by the console."""

import time
from collections import deque

from offbeat.types import Clock

_STEPS = 32
"""Number of last steps that count: enough to average over evaluations and checkpoints, few enough to follow answers that grow longer."""


class Pace:
    """The pace of a run by the times of its last steps."""

    def __init__(self, total_steps: int, *, clock: Clock = time.monotonic) -> None:
        """Prepare the estimate of a run of so many steps; a resumed one begins with a later step."""
        self._total_steps = total_steps
        self._clock = clock
        self._seen: deque[tuple[int, float]] = deque(maxlen=_STEPS + 1)

    def step(self, step: int) -> None:
        """Note that a step has ended now."""
        self._seen.append((step, self._clock()))

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step is done; None before the second call of `step`."""
        if len(self._seen) < 2:
            return None
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        return max(0, self._total_steps - last) * (ended - began) / max(1, last - first)


def duration(seconds: float) -> str:
    """Write a duration in two units at most, such as "42 s", "3 min 5 s" or "1 h 12 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def short_duration(seconds: float) -> str:
    """Write a duration in one unit, such as "42 s", "3 min" or "1.2 h"."""
    if seconds < 59.5:
        return f"{round(seconds)} s"
    return f"{round(seconds / 60)} min" if seconds < 3570 else f"{seconds / 3600:.1f} h"
