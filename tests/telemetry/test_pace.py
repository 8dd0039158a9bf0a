"""How long the rest of a run takes."""

import pytest

from offbeat.telemetry.pace import Pace, duration, short_duration


def test_the_rest_is_estimated_from_the_steps_that_were_seen():
    now = 100.0
    pace = Pace(20, clock=lambda: now)
    assert pace.left_s is None
    pace.step(5)  # a run that was resumed
    assert pace.left_s is None
    now += 3.0
    pace.step(6)
    assert pace.left_s == pytest.approx(14 * 3.0)
    now += 5.0
    pace.step(7)
    assert pace.left_s == pytest.approx(13 * 4.0)


def test_the_last_steps_count_alone_and_nothing_is_left_at_the_end():
    now = 0.0
    pace = Pace(200, clock=lambda: now)
    for step in range(1, 201):
        now += 10.0 if step <= 100 else 1.0
        pace.step(step)
        if step == 140:
            assert pace.left_s == pytest.approx(60.0)
    assert pace.left_s == 0


@pytest.mark.parametrize(("seconds", "text"), [
    (0.2, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (185, "3 min 5 s"), (4320, "1 h 12 min"), (200_000, "55 h 33 min")])
def test_durations_have_two_units_at_most(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [
    (0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (3500, "58 min"), (3599, "1.0 h"), (4320, "1.2 h"), (360_000, "100.0 h")])
def test_short_durations_have_one_unit(seconds, text):
    assert short_duration(seconds) == text
