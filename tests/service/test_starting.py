"""What the server says while it starts."""

import asyncio

import pytest

from offbeat.phase import phase
from offbeat.service import starting
from offbeat.service.starting import Told, tell_while_starting


def test_what_takes_a_moment_is_said_once_and_again_where_it_takes_long() -> None:
    told, said = Told(), []
    for second in range(100):
        said.append(told.line("engines load the model: waiting for engine 0", float(second)))
    assert [second for second, line in enumerate(said) if line] == [2, 32, 62, 92]
    assert said[2] == "  engines load the model: waiting for engine 0 (2 s)" and said[92].endswith("(1 min 32 s)")


def test_what_changes_is_said_at_once_and_what_is_quick_or_nothing_never() -> None:
    told = Told()
    assert told.line("starting: waiting for rank 0, engine 0", 3.0) and told.line("starting: waiting for engine 0", 3.5)
    assert not told.line("starting: waiting for engine 0", 4.0)
    assert not told.line("quick", 1.9) and not told.line("", 50.0)


def test_phases_of_the_process_are_told_until_the_server_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_LONG_S", 0.0)
    monkeypatch.setattr(starting, "_LOOK_S", 0.0)
    said: list[str] = []
    looks = iter([False, False, True])
    with phase("engines load the model", describe=lambda: "waiting for engine 0"):
        asyncio.run(tell_while_starting(said.append, is_ready=lambda: next(looks)))
    assert said == ["  engines load the model: waiting for engine 0 (0 s)"]
