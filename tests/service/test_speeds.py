"""Tokens per second by model."""

from offbeat.service.speeds import Speeds


def test_a_speed_is_the_mean_over_the_last_ten_seconds_and_nothing_older_is_kept() -> None:
    now = [100.0]
    speeds = Speeds(clock=lambda: now[0])
    assert speeds.per_s() == {}
    for _ in range(40):
        speeds.note("a", 50)
        now[0] += 0.5
    speeds.note("b", 7)
    assert speeds.per_s() == {"a": 90.0, "b": 0.7}, "nine whole seconds of a hundred each, and the one that runs"
    now[0] += 8
    assert speeds.per_s() == {"a": 10.0, "b": 0.7}
    now[0] += 20
    assert speeds.per_s() == {} and not speeds._seconds
    for model in range(1000):
        speeds.note(str(model), 1)
        now[0] += 1
    assert len(speeds._seconds) <= 10
