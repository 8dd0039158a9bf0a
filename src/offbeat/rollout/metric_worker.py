"""The process of a metric: loads one function by its dotted name and calls it with the answers to a set. The rest is user code.

It sets its own memory limit before any of that runs.
"""

import re
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.data import wire
from offbeat.data.functions import resolve
from offbeat.data.given import Given, receive
from offbeat.data.reward import FailedReward, NamedReward, check_reward
from offbeat.errors import CodeError, printable, shorten
from offbeat.evaluation.samples import MetricSample
from offbeat.raised import describe_at, traceback_of

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,99}")
_TAKEN = re.compile(r"(accuracy|reward_mean|pass_at_\d+)(_low|_high)?|failed_prompts|prompts")
"""Names of the metrics that every evaluation has."""


@dataclass(frozen=True)
class MetricRequest:
    """Request to load or call a metric.

    Attributes:
        metric: name of the function.
        memory_bytes: memory limit of the process; 0 for none.
        given: the function, where a Python program gave it as an object.
        samples: the answers that it is called with.
    """

    metric: str
    memory_bytes: int = 0
    given: tuple[Given, ...] = ()
    samples: tuple[MetricSample, ...] = ()


@dataclass(frozen=True)
class MetricValues:
    """Values of a metric by name, such as {"mean_length": 31.5}."""

    values: dict[str, float]


class MetricWorker:
    """Handler of a metric's process: `load` tries to load the function, `measure` also calls it."""

    def handle(self, method: str, payload: bytes) -> bytes:
        request = wire.decode(MetricRequest, payload)
        if request.memory_bytes:
            resource.setrlimit(resource.RLIMIT_DATA, (request.memory_bytes, request.memory_bytes))
        receive(request.given)
        function = resolve(request.metric, kind="metric")
        if method == "load":
            return b""
        try:
            found = function(list(request.samples))
        except BaseException as exc:  # sys.exit() too
            sys.stderr.write(traceback_of(exc))
            raise CodeError(printable(f"the metric {request.metric} raised {describe_at(exc)}", most=1000)) from None
        return wire.encode(MetricValues(metric_values(found, request.metric)))


def metric_values(found: Any, dotted: str) -> dict[str, float]:
    """Return the values of a metric by name.

    Raises:
        CodeError: it is neither a finite number nor a mapping of names to such, or a metric cannot have such a name.
    """
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
