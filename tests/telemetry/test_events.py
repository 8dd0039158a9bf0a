"""The log of what happened."""

import time
from pathlib import Path

from offbeat.telemetry.events import EventLog
from offbeat.telemetry.jsonl import read_json_lines


def test_events_are_kept_in_order_with_kind_time_and_fields_across_openings(tmp_path):
    path = tmp_path / "events.jsonl"
    before = time.time()
    for version in (1, 2):
        log = EventLog(path)
        log.record("publish", version=version, folder=Path("weights") / str(version))
        log.close()
    events = read_json_lines(path)
    assert [(e["kind"], e["version"], e["folder"]) for e in events] == [("publish", 1, "weights/1"), ("publish", 2, "weights/2")]
    assert before - 0.01 <= events[0]["time_s"] <= events[1]["time_s"] <= time.time() + 0.01
