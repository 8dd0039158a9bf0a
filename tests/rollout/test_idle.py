"""The hint that episodes wait and engines idle, on a clock of the test's own."""

import pytest

from offbeat.rollout.idle import IdleHint


def played(*, idle_s: float, busy_s: float, running: int = 4, limit: str = "rollout.max_concurrent_rollouts = 4") -> list[str]:
    """What is told after two minutes of calls that take `busy_s` and are `idle_s` apart."""
    told: list[str] = []
    now = [0.0]
    hint = IdleHint(told.append, num_running=lambda: running, limit=lambda: limit, now_s=lambda: now[0])
    while now[0] < 120:
        now[0] += idle_s
        with hint.calling():
            now[0] += busy_s
    return told


def test_it_is_told_once_with_the_setting_and_the_factor() -> None:
    [told] = played(idle_s=1.5, busy_s=0.5)
    assert told == (
        "engines had nothing to do for 75% of the last minute, as all groups waited for their environments;"
        " rollout.max_concurrent_rollouts = 4 keeps out more, and 4.0 times as many groups would keep the engines busy")


@pytest.mark.parametrize("options", [{"busy_s": 5.0}, {"running": 0}, {"limit": ""}])
def test_busy_engines_and_places_that_are_free_are_no_reason(options) -> None:
    assert played(**{"idle_s": 1.5, "busy_s": 0.5} | options) == []


def test_time_in_which_no_group_ran_is_the_trainers() -> None:
    told: list[str] = []
    now, running = [0.0], [0]
    hint = IdleHint(told.append, num_running=lambda: running[0], limit=lambda: "x", now_s=lambda: now[0])
    for _ in range(20):  # synchronous training: four seconds of generation, eight of training
        running[0] = 4
        hint.look()
        with hint.calling():
            now[0] += 4
        running[0] = 0
        hint.look()
        now[0] += 8
    assert told == []


def test_calls_at_the_same_time_count_once() -> None:
    told: list[str] = []
    now = [0.0]
    hint = IdleHint(told.append, num_running=lambda: 1, limit=lambda: "x", now_s=lambda: now[0])
    with hint.calling():
        for _ in range(100):
            now[0] += 1
            with hint.calling():
                now[0] += 1
    assert told == []
