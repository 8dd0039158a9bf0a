"""Files of lines that something else has written into."""

import json

import pytest

from offbeat.telemetry.console import Console
from offbeat.telemetry.events import EventLog
from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.mend import mend
from offbeat.telemetry.record import RunRecord
from offbeat.telemetry.sinks import JsonLinesSink
from offbeat.telemetry.trace import Tracer, read_trace

RUBBISH = [b"\xff\xfe\x00\xc3\x28", b"7", b"[]", b"[" * 100_000, b"9" * 5000, b'{"a": ', b"\x00" * 4096, b"{}", b'{"ph": "X"}']


def is_number(line: bytes) -> bool:
    return line.isdigit()


def test_sound_files_and_missing_ones_are_left_alone(tmp_path):
    path = tmp_path / "x"
    assert mend(path, is_number) == "" and not path.exists()
    path.write_bytes(b"1\n2\n")
    assert mend(path, is_number) == "" and path.read_bytes() == b"1\n2\n"


@pytest.mark.parametrize("whole", [b"", b"1\n", b"1\n" * 100_000])
def test_a_line_that_a_crash_tore_is_cut_off_without_a_word(whole, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(whole + b"x" * 200_000)
    assert mend(path, is_number) == ""
    assert path.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_what_is_no_line_of_the_file_is_left_out_and_the_file_as_it_was_kept(tmp_path):
    path = tmp_path / "x"
    for number in range(2):
        damaged = b"1\n\xff\xff\n2\nrubbish\n3\n4"
        path.write_bytes(damaged)
        kept = "x.damaged" + ".1" * number
        assert mend(path, is_number) == f"x had 2 lines that are no record, now left out; the file as it was is kept as {kept}"
        assert path.read_bytes() == b"1\n2\n3\n"
        assert (tmp_path / kept).read_bytes() == damaged


@pytest.mark.parametrize("rubbish", RUBBISH)
def test_rubbish_in_metrics_events_and_time_line_costs_no_other_record(rubbish, tmp_path):
    metrics, events, tracer = JsonLinesSink(tmp_path / "m"), EventLog(tmp_path / "e"), Tracer(tmp_path / "t")
    for step in (1, 2):
        metrics.write({"global_step": step})
        events.record("publish", version=step)
        tracer.add("train", "controller", step, step + 0.5)
    for name in "met":
        with (tmp_path / name).open("ab") as file:
            file.write(rubbish + b"\n")
    assert [span.start_s for span in read_trace(tmp_path / "t")] == [1, 2], "a report reads it as it is"
    again = JsonLinesSink(tmp_path / "m")
    again.resume_at(2)
    assert [row["global_step"] for row in read_json_lines(tmp_path / "m")] == [1] and again.steps == {1}
    assert EventLog(tmp_path / "e").mended == "e had 1 line that is no record, now left out; the file as it was is kept as e.damaged"
    tracer = Tracer(tmp_path / "t")
    assert tracer.mended.endswith("t.damaged")
    tracer.add("train", "controller", 3, 3.5)
    assert [span.start_s for span in read_trace(tmp_path / "t")] == [1, 2, 3]
    json.loads((tmp_path / "t").read_text().rstrip().rstrip(",") + "]")


def test_a_run_says_what_it_has_mended_and_which_rows_are_missing(tmp_path):
    class Notes(Console):
        def note(self, text: str) -> None:
            notes.append(text)

    notes: list[str] = []
    (tmp_path / "metrics.jsonl").write_bytes(b'{"global_step": 0}\n{"global_step": 1}\n{"global_step": "two"}\n{"global_step": 3}\n')
    with RunRecord(tmp_path, trace=True, console=Notes("quiet")) as record:
        record.resume_after(4)
    assert notes == [
        "metrics.jsonl had 1 line that is no record, now left out; the file as it was is kept as metrics.jsonl.damaged",
        "metrics.jsonl has no rows of 2 of the 4 steps that are done"]
    assert [event["kind"] for event in read_json_lines(tmp_path / "events.jsonl")] == ["mended", "rows_lost"]
