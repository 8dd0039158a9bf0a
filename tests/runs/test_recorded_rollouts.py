"""What rollouts tell becomes events of the run."""

from pathlib import Path
from types import SimpleNamespace

from offbeat.data.pieces import Pieces
from offbeat.data.tokenizer import character_tokenizer
from offbeat.journal.run_journal import NoJournal
from offbeat.runs.recorded_rollouts import RecordedRollouts
from offbeat.telemetry.console import Console
from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.record import RunRecord


def test_samples_and_groups_that_are_lost_or_played_again_are_events_with_their_reasons(tmp_path: Path) -> None:
    with RunRecord(tmp_path, trace=False, console=Console("quiet")) as record:
        listener = RecordedRollouts(record, SimpleNamespace(), Pieces(character_tokenizer()), keeps_rejected=False, journal=NoJournal())
        listener.on_unusable("0:1", ["too long: a row of 13 tokens"])
        listener.on_played_again("0:2", num_again=3, num_left=1, num_tokens=7)
        listener.on_played_anew("0:3", "the prompt has changed")
    events = [{name: value for name, value in event.items() if name != "time"} for event in read_json_lines(tmp_path / "events.jsonl")]
    assert [(event["kind"], event["prompt_id"]) for event in events] == [
        ("unusable_samples", "0:1"), ("played_again", "0:2"), ("played_anew", "0:3")]
    assert events[0]["reasons"] == ["too long: a row of 13 tokens"] and events[2]["reason"] == "the prompt has changed"
    assert (events[1]["calls_from_journal"], events[1]["calls_not_asked_again"]) == (3, 1)
