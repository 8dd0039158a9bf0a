"""The process of a metric: loads one function by its dotted name and calls it with the answers to a set. The rest is user code."""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.data import wire
from offbeat.data.reward import FailedReward, NamedReward, check_reward
from offbeat.errors import CodeError, printable, shorten
from offbeat.evaluation.samples import MetricSample
from offbeat.raised import describe_at, traceback_of
from offbeat.user_code.boundary import Caught
from offbeat.user_code.functions import resolve
from offbeat.user_code.handshake import enter

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,99}")
_TAKEN = re.compile(r"(accuracy|reward_mean|pass_at_\d+)(_low|_high)?|failed_prompts|prompts")
"""Names of the metrics that every evaluation has."""


@dataclass(frozen=True)
class MetricLoadRequest:
    """Request to load the function of this name as a metric."""

    metric: str


@dataclass(frozen=True)
class MetricRequest:
    """Request to call the metric with the answers to a set."""

    samples: tuple[MetricSample, ...]


@dataclass(frozen=True)
class MetricValues:
    """Values of a metric by name, such as {"mean_length": 31.5}."""

    values: dict[str, float]


class MetricWorker:
    """Handler of a metric's process: `load` once, then `measure`."""

    def __init__(self) -> None:
        self._dotted = ""
        self._function: Callable[..., Any] | None = None

    def handle(self, method: str, payload: bytes) -> bytes:
        if method == "load":
            self._dotted = wire.decode(MetricLoadRequest, enter(payload).load).metric
            self._function = resolve(self._dotted, kind="metric")
            return b""
        assert self._function is not None, "measure before load"
        samples = list(wire.decode(MetricRequest, payload).samples)
        with Caught(BaseException) as caught:  # sys.exit() too
            found = self._function(samples)
        if (exc := caught.error) is not None:
            sys.stderr.write(traceback_of(exc))
            raise CodeError(printable(f"the metric {self._dotted} raised {describe_at(exc)}", most=1000))
        return wire.encode(MetricValues(metric_values(found, self._dotted)))


def metric_values(found: Any, dotted: str) -> dict[str, float]:
    """Return a metric's values by name; raises CodeError unless it is a finite number, or a mapping of valid names to such."""
    value = check_reward(found)
    if isinstance(value, FailedReward):
        raise CodeError(
            f"the metric {dotted} must return a number, or a mapping of names to numbers, returned {shorten(found)}: {value.reason}")
    values: Mapping[str, float] = value.parts if isinstance(value, NamedReward) else {dotted.rpartition(":")[2]: float(value)}
    if wrong := next((name for name in values if not _NAME.fullmatch(name) or _TAKEN.fullmatch(name)), None):
        raise CodeError(
            f"the metric {dotted} must use names of letters, digits, '_', '.', '@' and '-' that evaluations do not have already, got"
            f" {wrong[:120]!r}; choose another")
    return dict(values)
