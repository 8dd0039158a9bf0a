"""What happens to engines, in the record of a run."""

from pathlib import Path

from offbeat.fleet.listener import FleetListener, FleetRecord, HealingRecord
from offbeat.telemetry.console import Console
from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.record import RunRecord


def tell(listener: FleetListener) -> None:
    """Of everything, once."""
    listener.quarantined("engine 0", "it died")
    listener.failed("engine 0", "no answer")
    listener.busy("engine 0", 1.0, 2.0)
    listener.waits("waiting up to 60 s")
    listener.event("healed", engine="engine 0", seconds=2.5)


def test_a_record_has_events_of_all_that_happens_and_the_console_what_concerns_its_reader(tmp_path: Path, monkeypatch) -> None:
    notes: list[str] = []
    tell(FleetListener())  # nobody hears of it
    with RunRecord(tmp_path, trace=False, console=Console("quiet")) as record:
        monkeypatch.setattr(record.console, "note", notes.append)
        tell(FleetRecord(record))
        assert notes == ["engine 0 is quarantined: it died", "waiting up to 60 s"]
        tell(HealingRecord(record))
        assert notes[2:] == [*notes[:2], "engine 0 is healed after 2.5 s and serves again"]
    events = [(event["kind"], event["engine"]) for event in read_json_lines(tmp_path / "events.jsonl") if "engine" in event]
    assert events == [("quarantine", "engine 0"), ("engine_failed", "engine 0"), ("healed", "engine 0")] * 2
