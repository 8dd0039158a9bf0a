"""Seconds of the stages of a step."""

from pathlib import Path

import pytest

from offbeat.controller import step_times
from offbeat.controller.step_times import StepTimes
from offbeat.telemetry.trace import Tracer, TraceReader


class Clock:
    """A clock that a test sets."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_times, "time", clock)
    return clock


def test_seconds_of_a_stage_within_another_count_for_it_alone_and_stages_of_one_metric_are_added(clock: Clock) -> None:
    times = StepTimes(Tracer(None))
    clock.now_s += 0.5  # for no stage
    with times.during("step/rollout_wait_s"):
        with times.during("step/publish_s"):
            clock.now_s += 1
        clock.now_s += 2
    with times.during("step/publish_s"):
        clock.now_s += 4
    assert times.stage_metrics() == {"step/rollout_wait_s": 2, "step/publish_s": 5, "step/total_s": 7.5}


def test_a_stage_that_fails_is_counted_and_ends(clock: Clock) -> None:
    times = StepTimes(Tracer(None))
    with pytest.raises(ValueError), times.during("step/train_s"):
        clock.now_s += 1
        raise ValueError
    clock.now_s += 1
    assert times.stage_metrics() == {"step/train_s": 1, "step/total_s": 2}


def test_stages_with_a_name_are_spans_of_the_controller(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "trace.json")
    times = StepTimes(tracer)
    with times.during("step/train_s", "train", step=3), times.during("step/publish_s"):
        pass
    tracer.close()
    (span,) = TraceReader(tmp_path / "trace.json").read()
    assert (span.name, span.track, span.args) == ("train", "controller", {"step": 3})
