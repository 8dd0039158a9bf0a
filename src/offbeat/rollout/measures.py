"""Measurements that programs return beside rewards: which can be metrics, and their means over a step. Pure; fed by workflows."""

import re
from collections.abc import Mapping
from typing import Any

from offbeat.data.reward import FailedReward, NamedReward, check_reward
from offbeat.telemetry.tracker import StatsPart
from offbeat.types import Tell

MOST_NAMES = 64
"""Number of names that a run keeps, the first ones: each is a curve of every sink."""

_NAME = re.compile(r"\w[\w./-]{0,59}", re.ASCII)


def numbers_of(given: Mapping[Any, Any]) -> dict[str, float]:
    """Return the finite numbers of a mapping by name, at most `MOST_NAMES`; {"a": 3, "b": "x"} gives {"a": 3.0}, for example."""
    found: dict[str, float] = {}
    for name, value in given.items():
        number = check_reward(value)
        if isinstance(name, str) and not isinstance(number, FailedReward | NamedReward) and len(found) < MOST_NAMES:
            found[name] = float(number)
    return found


class Measures:
    """Adds up the measurements since the last `take_stats`, under names that metrics may have."""

    def __init__(self, tell: Tell = lambda _text: None) -> None:
        """`tell` is called once if names are left out."""
        self._tell = tell
        self._known: set[str] = set()
        self._sums: dict[str, tuple[float, float]] = {}
        self._told = False

    def add(self, measured: Mapping[str, float]) -> None:
        """Count one episode."""
        for name, value in measured.items():
            if self._takes(name):
                total, num = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = total + value, num + 1

    def take_stats(self) -> StatsPart:
        """Return the means since the last call, each over the episodes that have it, under names such as `rollout/metrics/tool_calls`."""
        sums, self._sums = self._sums, {}
        return StatsPart(means={f"rollout/metrics/{name}": mean for name, mean in sums.items()})

    def _takes(self, name: str) -> bool:
        if name in self._known:
            return True
        if _NAME.fullmatch(name) and len(self._known) < MOST_NAMES:
            self._known.add(name)
            return True
        if not self._told:
            self._told = True
            why = (
                f"a run keeps {MOST_NAMES} names" if _NAME.fullmatch(name)
                else "a name has 1 to 60 letters, digits, underscores, dots, slashes and hyphens, and begins with one of the first three")
            self._tell(f"the metric {name[:60]!r} of an episode is left out, as {why} (this is shown once)")
        return False
