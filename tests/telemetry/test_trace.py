"""The time line file."""

import errno
import json
import time

import pytest

from offbeat.errors import StorageError
from offbeat.telemetry import trace
from offbeat.telemetry.trace import Span, Tracer, TraceReader, read_trace


def test_spans_come_back_with_track_and_microsecond_times(tmp_path):
    path = tmp_path / "trace.json"
    tracer = Tracer(path)
    tracer.add("train", "controller", 1_700_000_000.25, 1_700_000_001.5, {"step": 3})
    tracer.add("generate", "engine 0", 1_700_000_000.0, 1_700_000_000.000001)
    tracer.close()
    train, generate = read_trace(path)
    assert train == Span("train", "controller", 1_700_000_000.25, 1_700_000_001.5, {"step": 3})
    assert generate.track == "engine 0"
    assert generate.end_s - generate.start_s == pytest.approx(1e-6, rel=0.3)


def test_a_span_measures_its_body_and_is_kept_when_the_body_raises(tmp_path):
    tracer = Tracer(tmp_path / "trace.json")
    before = time.time()
    with pytest.raises(KeyError), tracer.span("publish", "controller", version=4):
        time.sleep(0.02)
        raise KeyError
    (span,) = read_trace(tmp_path / "trace.json")
    assert before - 1e-3 <= span.start_s and span.end_s <= time.time() + 1e-3
    assert span.end_s - span.start_s >= 0.02
    assert span.args == {"version": 4}
    tracer.close()


def test_the_file_is_chromes_array_format_with_named_tracks(tmp_path):
    path = tmp_path / "trace.json"
    tracer = Tracer(path)
    tracer.add("a", "controller", 1.0, 2.0)
    tracer.add("b", "engine 0", 1.0, 2.0)
    tracer.add("c", "controller", 2.0, 3.0)
    tracer.close()
    events = json.loads(path.read_text())
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(names.values()) == ["controller", "engine 0"]
    assert [(e["name"], names[e["tid"]], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        ("a", "controller", 1e6, 1e6),
        ("b", "engine 0", 1e6, 1e6),
        ("c", "controller", 2e6, 1e6),
    ]


def test_a_trace_is_valid_json_after_its_end_however_often_it_went_on(tmp_path):
    path = tmp_path / "trace.json"
    for number in range(3):
        tracer = Tracer(path)
        if number:
            tracer.add("train", "controller", number, number + 0.5)
        assert tracer.mended == ""
        tracer.close()
        events = json.loads(path.read_text())
        assert sum(event["ph"] == "X" for event in events) == number == len(read_trace(path))
    assert [event["name"] for event in events].count("process_name") == 1


def test_a_resumed_run_appends_after_a_torn_line_and_keeps_the_tracks(tmp_path):
    path = tmp_path / "trace.json"
    first = Tracer(path)
    first.add("a", "controller", 1.0, 2.0)
    first.add("b", "engine 0", 1.0, 2.0)
    first.close()
    with path.open("a") as file:
        file.write('{"ph": "X", "na')
    assert len(read_trace(path)) == 2
    second = Tracer(path)
    second.add("c", "engine 0", 3.0, 4.0)
    second.add("d", "rank 0", 3.0, 4.0)
    second.close()
    assert [(span.name, span.track) for span in read_trace(path)] == [
        ("a", "controller"), ("b", "engine 0"), ("c", "engine 0"), ("d", "rank 0")]
    assert path.read_text().count("thread_name") == 3


def test_without_a_path_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracer = Tracer(None)
    with tracer.span("train", "controller"):
        pass
    tracer.close()
    assert list(tmp_path.iterdir()) == []
    assert read_trace(tmp_path / "trace.json") == []


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"telemetry\.trace"):
        Tracer(tmp_path / "file" / "trace.json")


def test_a_full_disk_does_not_keep_a_trace_from_being_closed(tmp_path):
    tracer = Tracer(tmp_path / "trace.json")
    tracer.add("train", "controller", 1.0, 2.0)
    file, tracer._file = tracer._file, open("/dev/full", "wb")  # noqa: PTH123, SIM115 - what is written there fails
    assert file is not None
    file.close()
    tracer.close()
    tracer.close()
    assert [span.name for span in read_trace(tmp_path / "trace.json")] == ["train"]


def test_spans_that_a_full_disk_loses_are_told_of_once_and_those_after_it_are_kept(tmp_path):
    class Disk:
        """The file, on a disk that is full for a while."""

        def __init__(self, file):
            self.file, self.name, self.room = file, file.name, None

        def write(self, line):
            if self.room is None:
                return self.file.write(line)
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            written, self.room = self.file.write(line[:self.room]), 0
            return written

    told = []
    tracer = Tracer(tmp_path / "trace.json", tell=told.append)
    disk = tracer._file = Disk(tracer._file)
    tracer.add("before", "controller", 1.0, 2.0)
    disk.room = 10
    for name in ("torn", "lost"):
        tracer.add(name, "controller", 2.0, 3.0)
    disk.room = None
    tracer.add("after", "controller", 3.0, 4.0)
    tracer._file = disk.file
    tracer.close()
    assert told == [
        f"the time line in {tmp_path / 'trace.json'} has gaps: the disk is full; free space, or turn it off with telemetry.trace"]
    assert [span.name for span in read_trace(tmp_path / "trace.json")] == ["before", "after"]


def test_of_a_trace_that_grows_only_what_was_appended_is_parsed(tmp_path, monkeypatch):
    path, parsed = tmp_path / "trace.json", []
    monkeypatch.setattr(trace, "_parse_event", lambda line, parse=trace._parse_event: parsed.append(line) or parse(line))
    tracer, reader = Tracer(path), TraceReader(path)
    for number in range(50):
        tracer.add(f"s{number}", "controller", number, number + 1)
        parsed.clear()
        assert [span.name for span in reader.read()] == [f"s{earlier}" for earlier in range(number + 1)]
        assert number == 0 or len(parsed) == 1
    for many in (40, 400):
        for number in range(many):
            tracer.add("of many", "controller", number, number + 1)
        parsed.clear()
        reader.read()
        assert len(parsed) == many
    with path.open("a") as file:
        file.write('{"ph": "X", "name": "torn", "pid": 1, "tid": 1, "ts": 1')
    assert len(reader.read()) == 490
    with path.open("a") as file:
        file.write(', "dur": 1},\n')
    assert reader.read()[-1].name == "torn" and reader.read() == read_trace(path)


def test_a_trace_that_is_not_a_continuation_is_read_again(tmp_path):
    path = tmp_path / "trace.json"
    reader = TraceReader(path)
    assert reader.read() == []
    for begun, names in (("new", "abc"), ("goes on", "de"), ("goes on", "f")):
        tracer = Tracer(path)
        for name in names:
            tracer.add(name, begun, 1, 2)
        tracer.close()  # writes an end, which the next one takes off again
        assert reader.read() == read_trace(path)
    assert [span.name for span in reader.read()] == list("abcdef")
    path.unlink()
    assert reader.read() == []
    Tracer(path).add("other", "controller", 1, 2)
    assert [span.name for span in reader.read()] == ["other"]
    path.write_bytes(path.read_bytes().replace(b"other", b"mixed"))
    assert [span.name for span in reader.read()] == ["mixed"]
