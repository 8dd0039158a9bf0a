"""A step that computes may take long, one that stands still may not, and none may last for ever."""

import pytest

from offbeat.engine.stall import COMPUTING_FACTOR, StepWatch
from offbeat.pulse import LOOK_S, Signs

PROBE_S = 2.0


def told_after(share: float, *, patience_s: float = 60.0, until_s: float = 1000.0, probe_s: float = PROBE_S) -> tuple[float, str]:
    """When a step is told that computes this share of the time of one core, and what is told of it."""
    watch, now_s = StepWatch(patience_s), 0.0
    while now_s < until_s:
        now_s += probe_s
        if told := watch.look(7, now_s, Signs(7, share * now_s), now_s=1e6 + now_s):
            return now_s, told
    return now_s, ""


def test_a_step_that_sleeps_is_told_after_the_patience() -> None:
    after_s, told = told_after(0.0)
    assert after_s == 60.0 + PROBE_S, "counted from the first look"
    assert told == (
        "the engine is slow or hung: it has been in one step for 62 s, and has computed nothing for 60 s of it; if the machine is that"
        " slow, raise inference.stall_timeout_s, or --stall-timeout-s of offbeat engine, above 60")


@pytest.mark.parametrize("share", [0.05, 1.0, 16.0])
def test_a_step_that_computes_however_slowly_has_several_times_as_long(share: float) -> None:
    after_s, told = told_after(share)
    assert after_s == COMPUTING_FACTOR * 60.0 and "for 300 s, although it computes; " in told


def test_what_a_sleeping_process_computes_now_and_then_is_no_sign_of_life() -> None:
    assert told_after(0.001)[0] == 60.0 + PROBE_S


def test_a_patience_that_was_raised_counts() -> None:
    assert told_after(0.0, patience_s=120.0)[0] == 122.0 and told_after(0.0, until_s=50.0)[1] == ""


def test_a_sign_of_life_starts_the_patience_anew() -> None:
    watch, told = StepWatch(60.0), []
    for second in range(0, 120, 2):
        told.append(watch.look(1, float(second), Signs(1, 1.0 if second >= 50 else 0.0), now_s=float(second)))
    assert told[:55] == [""] * 55 and told[55].startswith("the engine is slow or hung"), "still since the look at 50 s"


def test_each_step_is_judged_by_itself() -> None:
    watch = StepWatch(60.0)
    for second in range(0, 600, 2):
        assert watch.look(second // 50, float(second % 50), Signs(0, 0.0), now_s=float(second)) == ""


def test_the_time_of_a_process_that_was_stopped_is_not_believed_at_once() -> None:
    watch = StepWatch(60.0)
    told = [watch.look(1, 2.0, Signs(1, 0.0), now_s=now_s) for now_s in (0.0, 250.0, 500.0, 750.0, 1000.0)]
    assert told[:4] == [""] * 4 and told[4], "it takes four looks"


def test_looks_in_quick_succession_neither_help_nor_harm() -> None:
    watch, now_s = StepWatch(1.0), 0.0
    assert watch.look(1, 2.0, Signs(1, 0.0), now_s=now_s) == ""
    for _ in range(4):
        assert watch.look(1, 2.0, Signs(1, 0.0), now_s=now_s + LOOK_S / 2) == "", "too short a time to tell"
        now_s += LOOK_S
        told = watch.look(1, 2.0, Signs(1, 0.0), now_s=now_s)
    assert told
