"""Parts of an arena that need no engine. Whole arenas run in the tests of the controller and of SPMD mode."""

import io
from pathlib import Path

from offbeat.cluster.arena import make_quarantine
from offbeat.inference.pool import EnginePool
from offbeat.telemetry.console import Console
from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.record import RunRecord


def test_a_quarantine_is_recorded_shown_and_obeyed(tmp_path: Path) -> None:
    class Client:
        name = "engine 0"

    shown = io.StringIO()
    pool = EnginePool([Client()], request_timeout_s=1)
    with RunRecord(tmp_path, trace=False, console=Console("plain", stream=shown)) as record:
        quarantine = make_quarantine(pool, record)
        quarantine("engine 0", "its process died")
        quarantine("engine 0", "cannot be reached")  # the first reason stands
    assert not pool.healthy
    (event,) = read_json_lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["engine"], event["reason"]) == ("quarantine", "engine 0", "its process died")
    assert "engine 0 is quarantined: its process died" in shown.getvalue()
