"""Writing a journal on real files, on disks that are full for a while, and on ones that stay so."""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from offbeat.journal.segments import Reader, find, numbers
from offbeat.journal.writer import JournalWriter
from waiting import wait_until


@dataclass(frozen=True)
class Text:
    text: str
    num_bytes: int = 10

    def to_bytes(self) -> bytes:
        return self.text.encode()


def texts(*names: object) -> list[Text]:
    return [Text(str(name)) for name in names]


def read(folder: Path, *, base: int = 0) -> list[str]:
    """All that is readable from the last segment of a base on."""
    segments = find(folder)
    first = max((each.number for each in segments if each.base == base), default=None)
    return [] if first is None else [
        stored.payload.decode() for stored in Reader([each for each in segments if each.number >= first])]


class Disk:
    """The system's `os.write`, which may take nothing, or half."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self.takes = False, 1 << 30
        self.tried = threading.Semaphore(0)
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr("offbeat.journal.writer._RETRY_S", 0.01)

    def write(self, file: int, data: bytes) -> int:
        if self.full:
            done = self._write(file, bytes(data)[: self.takes]) if self.takes else 0
            self.takes = 0
            self.tried.release()
            if not done:
                raise OSError(28, "No space left on device")
            return done
        return self._write(file, data)


def test_records_are_readable_at_once_and_checkpoints_begin_segments(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, tell=print)
    writer.append(Text("before the beginning"))
    assert not writer.recording
    writer.begin_segment(0, texts("a", "b"))
    writer.append(Text("c"))
    writer.synced().result(10)
    assert read(tmp_path) == ["a", "b", "c"]  # the writer still has the file open
    writer.begin_segment(5, texts("d"))
    writer.append(Text("e"))
    writer.close()
    assert read(tmp_path) == ["a", "b", "c", "d", "e"] and read(tmp_path, base=5) == ["d", "e"]
    assert writer.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir()) - 2 * 44


def test_segments_that_no_checkpoint_needs_are_dropped(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, tell=print)
    for base in (0, 5, 10, 15):
        writer.begin_segment(base, texts(base))
    writer.drop(10)
    writer.synced().result(10)
    assert numbers(tmp_path) == [2, 3]
    writer.drop(12)  # the checkpoint of step 12 has no segment of its own: records since the one before lead to it
    writer.close()
    assert numbers(tmp_path) == [2, 3]


def test_another_process_goes_on_in_new_segments_and_its_records_never_pass_for_the_old_ones(tmp_path: Path) -> None:
    for name in ("a", "b"):
        writer = JournalWriter(tmp_path, tell=print)
        writer.begin_segment(0, texts(name))
        writer.close()
    assert numbers(tmp_path) == [0, 1]
    reader = Reader(find(tmp_path))
    assert [stored.payload for stored in reader] == [b"a"] and reader.cut is not None and reader.cut.torn
    assert read(tmp_path) == ["b"]


@pytest.mark.parametrize("takes", [0, 1, 10, 30])
def test_a_disk_that_is_full_for_a_while_loses_nothing_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: int,
) -> None:
    told: list[str] = []
    disk = Disk(monkeypatch)
    writer = JournalWriter(tmp_path, tell=told.append)
    writer.begin_segment(0, texts("a"))
    writer.synced().result(10)
    disk.takes, disk.full = takes, True
    for number in range(20):
        writer.append(Text(f"{number}"))
    for _ in range(4):
        assert disk.tried.acquire(timeout=10)
    assert read(tmp_path)[:1] == ["a"]
    disk.full = False
    writer.close()
    assert read(tmp_path) == ["a", *map(str, range(20))]
    assert told == [
        "the journal cannot be written: No space left on device; it is tried again, and a kill loses what waits",
        "the journal is written again, and complete"]


def test_a_segment_that_cannot_be_begun_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    disk.full, disk.takes = True, 7
    writer = JournalWriter(tmp_path / "journal", tell=lambda _text: None)
    writer.begin_segment(0, texts("a", "b"))
    for _ in range(3):
        assert disk.tried.acquire(timeout=10)
    disk.full = False
    writer.close()
    assert read(tmp_path / "journal") == ["a", "b"]


def test_when_too_much_waits_recording_ends_and_the_next_checkpoint_begins_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    disk = Disk(monkeypatch)
    writer = JournalWriter(tmp_path, tell=told.append, most_waiting_bytes=100)
    writer.begin_segment(0, texts("a"))
    writer.synced().result(10)
    disk.full, disk.takes = True, 0
    for number in range(15):
        writer.append(Text(f"{number}"))
    assert not writer.recording
    assert any(text.startswith("the journal has ended, because its disk takes nothing; it begins anew") for text in told)
    disk.full = False
    wait_until(lambda: read(tmp_path) == ["a", *map(str, range(10))], timeout_s=10)
    writer.append(Text("is not recorded"))
    writer.begin_segment(5, texts("b"))
    writer.append(Text("c"))
    writer.close()
    assert read(tmp_path, base=5) == ["b", "c"]
    assert read(tmp_path) == ["a", *map(str, range(10))], "the records after the gap do not continue those before it"


def test_a_disk_that_takes_nothing_neither_delays_the_caller_nor_keeps_the_run_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Disk(monkeypatch)
    writer = JournalWriter(tmp_path, tell=lambda _text: None)
    writer.begin_segment(0, texts("a"))
    writer.synced().result(10)
    disk.full, disk.takes = True, 0
    begin = time.perf_counter()
    for number in range(1000):
        writer.append(Text(f"{number}"))
    assert time.perf_counter() - begin < 1.0, "a thousand records are handed over without a wait"
    writer.close()
    assert read(tmp_path) == ["a"]


class NoBytes(Text):
    """Cannot be encoded."""

    def to_bytes(self) -> bytes:
        raise UnicodeEncodeError("utf-8", self.text, 0, 1, "surrogates not allowed")


def test_a_record_that_cannot_be_encoded_ends_recording_until_the_next_checkpoint_and_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    writer = JournalWriter(tmp_path, tell=told.append)
    writer.begin_segment(0, texts("a"))
    writer.append(NoBytes("\udcff"))
    writer.append(Text("left out"))
    writer.synced().result(10)
    assert read(tmp_path) == ["a"] and len(told) == 1
    assert told[0].startswith("the journal has ended at a record without bytes, ") and "surrogates not allowed" in told[0]
    writer.begin_segment(5, texts("b"))
    writer.append(Text("c"))
    writer.close()
    assert read(tmp_path, base=5) == ["b", "c"] and read(tmp_path) == ["a"]


class Held(Text):
    """An entry that the writer's thread waits with."""

    goes_on = threading.Event()

    def to_bytes(self) -> bytes:
        self.goes_on.wait(30)
        return super().to_bytes()


@pytest.mark.parametrize("by", ["before it is begun", "while it lasts"])
def test_a_sync_that_nobody_waits_for_any_more_ends_nothing(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs, goes_on, sync = threading.Semaphore(0), threading.Event(), os.fdatasync

    def slow_sync(file: int) -> None:
        syncs.release()
        goes_on.wait(30)
        sync(file)

    Held.goes_on.clear()
    writer = JournalWriter(tmp_path, tell=print)
    writer.begin_segment(0, texts("begun"))
    if by == "before it is begun":
        writer.append(Held("held"))
        done = writer.synced()
        assert done.cancel()
        Held.goes_on.set()
    else:
        monkeypatch.setattr(os, "fdatasync", slow_sync)
        done = writer.synced()
        syncs.acquire(timeout=30)
        done.cancel()
        goes_on.set()
    writer.append(Text("later"))
    writer.close()
    assert read(tmp_path)[-1] == "later"


def test_a_defect_of_the_writer_is_told_and_ends_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.journal.writer.first_needed", {}.__getitem__)
    told: list[str] = []
    writer = JournalWriter(tmp_path, tell=told.append)
    writer.begin_segment(0, texts("begun"))
    writer.synced().result(30)
    writer.drop(0)
    wait_until(lambda: bool(told), timeout_s=30)
    writer.begin_segment(1, texts("again"))
    assert not writer.recording
    assert told[0].startswith("the journal has ended, ") and told[0].endswith("; a restart goes on from what was recorded until now")
    writer.close()
    assert read(tmp_path) == ["begun"]


def test_what_was_written_is_synced_within_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = threading.Event()
    sync = os.fdatasync

    def note(file: int) -> None:
        sync(file)
        synced.set()

    monkeypatch.setattr(os, "fdatasync", note)
    writer = JournalWriter(tmp_path, tell=print, sync_s=0.05)
    writer.begin_segment(0, texts("a"))
    assert synced.wait(10)
    writer.close()
