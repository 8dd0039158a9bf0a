"""For how long engines idle while episodes wait, on a clock of the test's own."""

from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from offbeat.rollout.idle import IdleMeter, Limit, WaitingMinute
from offbeat.rollout.staleness import Gate


@dataclass
class Admitted:
    """Groups that run, and room for more."""

    running: list[str] = field(default_factory=lambda: ["a", "b", "c", "d"])
    capacity: int = 0
    max_running: int = 4


@dataclass
class Minutes:
    """The reported minutes, and a clock."""

    reported: list[WaitingMinute] = field(default_factory=list)
    now_s: float = 0.0

    def report_minute(self, minute: WaitingMinute) -> None:
        self.reported.append(minute)

    def meter(self, admission: Admitted | Gate, *, has_places: bool = False) -> IdleMeter:
        return IdleMeter(admission, self, has_places=has_places, now_s=lambda: self.now_s)


def played(admission: Admitted, *, idle_s: float, busy_s: float, has_places: bool = True, queued: int = 0) -> list[WaitingMinute]:
    """What is reported in two minutes of calls that take `busy_s` and are `idle_s` apart."""
    minutes = Minutes()
    meter = minutes.meter(admission, has_places=has_places)
    with ExitStack() as waiting:
        for _ in range(queued):
            waiting.enter_context(meter.queueing())
        while minutes.now_s < 123:
            minutes.now_s += idle_s
            with meter.calling():
                minutes.now_s += busy_s
    return minutes.reported


@pytest.mark.parametrize(("admission", "queued", "limit"), [
    (Admitted(), 0, "running"), (Admitted(max_running=5), 0, "staleness"), (Admitted(), 3, "places"), (Admitted(capacity=2), 3, "places")])
def test_each_minute_is_reported_with_the_share_in_which_no_engine_was_asked_and_the_limit(
    admission: Admitted, queued: int, limit: Limit,
) -> None:
    reported = played(admission, idle_s=1.5, busy_s=0.5, queued=queued)
    assert len(reported) == 2 and all((minute.limit, round(minute.idle_share, 2)) == (limit, 0.75) for minute in reported)
    assert not any(minute.mostly_rewards for minute in reported)


def test_waiting_off_the_clock_is_no_limit_without_places() -> None:
    [first, _] = played(Admitted(), idle_s=1.5, busy_s=0.5, queued=3, has_places=False)
    assert first.limit == "running"


def test_episodes_that_may_be_played_and_no_groups_are_no_minute() -> None:
    assert played(Admitted(capacity=1), idle_s=1.5, busy_s=0.5) == played(Admitted(running=[]), idle_s=1.5, busy_s=0.5) == []


def test_the_gate_of_a_run_says_what_is_admitted() -> None:
    gate, minutes = Gate(batch_size=2, max_running=1, eta=1, version=0), Minutes()
    meter = minutes.meter(gate)
    minutes.now_s += 100
    gate.admit("a")
    meter.look()
    minutes.now_s += 100
    meter.look()
    [minute] = minutes.reported
    assert (minute.limit, minute.whole_s, minute.idle_share) == ("running", 100, 1)


@pytest.mark.parametrize(("reward_s", "besides_s", "mostly"), [(3.0, 0.0, True), (2.0, 1.0, True), (1.0, 2.0, False)])
def test_the_time_in_which_rewards_are_waited_for_is_told_from_the_rest(reward_s: float, besides_s: float, mostly: bool) -> None:
    minutes = Minutes()
    meter = minutes.meter(Admitted())
    while minutes.now_s < 62:
        with meter.calling():
            minutes.now_s += 1
        with ExitStack() as scoring:
            for _ in range(6):
                scoring.enter_context(meter.scoring())
            minutes.now_s += reward_s
        minutes.now_s += besides_s
    [minute] = minutes.reported
    assert minute.mostly_rewards is mostly and minute.num_scored == 6 and minute.idle_share == pytest.approx(0.75)


def test_time_in_which_no_group_ran_is_the_trainers() -> None:
    minutes, admission = Minutes(), Admitted()
    meter = minutes.meter(admission)
    for _ in range(20):  # synchronous training: four seconds of generation, eight of training
        admission.running = ["a"] * 4
        meter.look()
        with meter.calling():
            minutes.now_s += 4
        admission.running = []
        meter.look()
        minutes.now_s += 8
    [minute] = minutes.reported
    assert minute.idle_s == 0


def test_calls_at_the_same_time_count_once() -> None:
    minutes = Minutes()
    meter = minutes.meter(Admitted())
    with meter.calling():
        for _ in range(100):
            minutes.now_s += 1
            with meter.calling():
                minutes.now_s += 1
    assert len(minutes.reported) == 3 and not any(minute.idle_s for minute in minutes.reported)
