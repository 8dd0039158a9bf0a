"""Seconds of each stage of a step, as metrics and as spans on the time line. Used by the loop, so that its stages stand without clocks.

Stages may be nested: the seconds of an inner one count for it alone. For example, a wait of 3 s for rollouts that begins with a wait of
1 s for engines gives `{"step/publish_s": 1.0, "step/rollout_wait_s": 2.0}`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from offbeat.telemetry.trace import Tracer


class StepTimes:
    """The stages of one step, from the moment at which this is made."""

    def __init__(self, tracer: Tracer) -> None:
        """`tracer` gets a span of each stage that has a name for it."""
        self._tracer = tracer
        self._start_s = self._since_s = time.monotonic()
        self._metric = ""
        self._spent: dict[str, float] = {}

    @contextmanager
    def during(self, metric: str, span: str = "", **args: Any) -> Iterator[None]:
        """Count the seconds of the body.

        Args:
            metric: name of the metric to which they are added, such as "step/train_s".
            span: name of the span on the controller's track, such as "train"; "" for none.
            args: of the span, such as step=12.
        """
        around = self._change(metric)
        try:
            with self._tracer.span(span, "controller", **args) if span else nullcontext():
                yield
        finally:
            self._change(around)

    @property
    def total_s(self) -> float:
        """Seconds since this was made."""
        return time.monotonic() - self._start_s

    def stage_metrics(self) -> dict[str, float]:
        """Return the seconds of all stages by metric, and `total_s` as "step/total_s"."""
        return {**self._spent, "step/total_s": self.total_s}

    def _change(self, metric: str) -> str:
        """Begin to count for another metric, "" for none; returns the one before."""
        now_s = time.monotonic()
        if before := self._metric:
            self._spent[before] = self._spent.get(before, 0.0) + now_s - self._since_s
        self._metric, self._since_s = metric, now_s
        return before
