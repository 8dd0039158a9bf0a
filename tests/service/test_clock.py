"""What expires does not by a system clock that jumps."""

import time

import pytest

from offbeat.service.clock import steady_time


def test_the_clock_of_the_service_goes_on_whatever_the_systems_says(monkeypatch: pytest.MonkeyPatch) -> None:
    before = steady_time()
    assert abs(before - time.time()) < 3600
    monkeypatch.setattr(time, "time", lambda: before + 40 * 86400)
    assert 0 <= steady_time() - before < 60
