"""Faults strike the rank, the point and the arrival that they name, and nothing else."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.errors import ConfigError
from offbeat.pulse import progress
from offbeat.sync.faults import Fault, FaultInjector, parse
from waiting import wait_until


def _saboteur(text, rank=1):
    return FaultInjector(rank, {"OFFBEAT_FAULT": text})


def test_a_fault_is_read():
    assert parse("rank=1, point=save_recover, kind=stop") == Fault(1, "save_recover", "stop")
    assert parse("rank=0,point=a,kind=kill,nth=2") == Fault(0, "a", "kill", 2)
    assert parse("") is None


@pytest.mark.parametrize("text", [
    "stop", "rank=1", "rank=x,point=a,kind=stop", "rank=-1,point=a,kind=stop", "rank=1,point=,kind=stop", "rank=1,point=a,kind=sleep",
    "rank=1,point=a,kind=stop,nth=0", "rank=1,point=a,kind=stop,when=now"])
def test_a_malformed_fault_is_refused(text):
    with pytest.raises(ConfigError, match="OFFBEAT_FAULT must be 'rank=R,point=NAME,kind=KIND'"):
        FaultInjector(0, {"OFFBEAT_FAULT": text})


def test_without_a_fault_for_this_rank_nothing_happens():
    assert FaultInjector(0, {}).strike("save") == "save"
    assert _saboteur("rank=1,point=save,kind=kill", rank=0).strike("save") == "save"
    assert _saboteur("rank=1,point=save,kind=kill").strike("evaluate") == "evaluate"


def test_the_nth_arrival_is_struck_once():
    saboteur = _saboteur("rank=1,point=save,kind=mismatch,nth=2")
    assert [saboteur.strike("save") for _ in range(3)] == ["save", "save (injected)", "save"]


def test_a_fault_strikes_at_places_too_once_it_is_armed(monkeypatch):
    monkeypatch.setattr("offbeat.pulse._strikes", [])
    _saboteur("").arm()
    progress("backward")
    _saboteur("rank=1,point=backward,kind=exception,nth=2").arm()
    progress("backward")
    progress("forward")
    with pytest.raises(RuntimeError, match="^injected at 'backward'$"):
        progress("backward")


def test_an_exception_is_raised():
    with pytest.raises(RuntimeError, match="^injected at 'save'$"):
        _saboteur("rank=1,point=save,kind=exception").strike("save")


def _strike_elsewhere(kind):
    code = f"from offbeat.sync.faults import FaultInjector; FaultInjector(1, {{'OFFBEAT_FAULT': 'rank=1,point=a,kind={kind}'}}).strike('a')"
    return subprocess.Popen([sys.executable, "-c", code])


def test_a_process_is_killed():
    with _strike_elsewhere("kill") as process:
        assert process.wait(timeout=30) == -signal.SIGKILL


@pytest.mark.parametrize(("kind", "state"), [("stop", "T"), ("slow", "S"), ("hang", "S")])
def test_a_process_stops_or_sleeps(kind, state):
    with _strike_elsewhere(kind) as process:
        wait_until(lambda: _state(process.pid) == state, timeout_s=30)
        process.kill()


def _state(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
