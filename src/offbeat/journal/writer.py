"""Appends records to a journal on a thread of its own. Neither a slow nor a full disk holds up the event loop, or ends a run.

    the caller  consumes nothing; produces entries, which it hands over without waiting
    the thread  consumes entries in order; encodes, writes and syncs them; waits for the next one, or for the time to sync

An entry that was written survives the death of the process, and `SYNC_S` later a power cut. While the disk takes nothing, entries wait
in memory and are tried again. When too many wait, recording ends until `begin_segment` is called for the next checkpoint: the files
then hold all up to there, and nothing that follows.
"""

import os
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from offbeat.disk import make_folder, sync
from offbeat.errors import describe
from offbeat.journal.beginnings import first_needed
from offbeat.journal.segments import FRAME_BYTES, HEADER_BYTES, first_of_process, frame, header, numbers, path_of
from offbeat.types import Hook, Tell
from offbeat.user_code.boundary import Caught

SYNC_S = 5.0
"""Most seconds between a record's writing and its sync."""

MOST_WAITING_BYTES = 256 << 20
"""Bytes of entries that may wait for a disk that takes nothing."""

_RETRY_S = 1.0
_CLOSE_S = 10.0


class Entry(Protocol):
    """Something to record."""

    @property
    def num_bytes(self) -> int:
        """Return its size in memory, nearly."""
        ...

    def to_bytes(self) -> bytes:
        """Return its bytes; called on the writer's thread."""
        ...


@dataclass(frozen=True)
class _Begin:
    base: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class _Drop:
    oldest: int


@dataclass(frozen=True)
class _Sync:
    done: "Future[None]"


@dataclass(frozen=True)
class _Gap:
    """From here to the next `_Begin`, entries are missing."""


_GAP = _Gap()
_Job = Entry | _Begin | _Drop | _Sync | _Gap


class JournalWriter:
    """Appends to the segments of a folder. Nothing is recorded before the first `begin_segment`.

    Attributes:
        num_bytes: bytes written so far.
        cpu_s: CPU-seconds that the thread has taken.
    """

    def __init__(self, folder: Path, *, tell: Tell, sync_s: float = SYNC_S, most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        """Start the thread; `tell` shows a sentence on a disk that takes nothing, from that thread."""
        self.num_bytes, self.cpu_s = 0, 0.0
        self._files = _Files(folder)
        self._tell = tell
        self._sync_s = sync_s
        self._most_waiting_bytes = most_waiting_bytes
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._recording = False
        self._broken = False
        self._trouble = ""
        self._gap = True
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    @property
    def recording(self) -> bool:
        """Whether entries are taken: from `begin_segment` on, unless too many wait."""
        return self._recording

    def append(self, entry: Entry) -> None:
        """Record an entry; returns at once. Does nothing while not `recording`."""
        if not self._recording:
            return
        if self._wait(entry):
            self._jobs.put(entry)
            return
        self._recording = False
        self._jobs.put(_GAP)
        self._tell("the journal has ended, because its disk takes nothing; it begins anew at the next checkpoint")

    def begin_segment(self, base: int, entries: Sequence[Entry]) -> None:
        """Begin a segment at the checkpoint of step `base`, with the entries that describe the run at this moment; returns at once.

        Where too many entries wait already, nothing is recorded until the next checkpoint.
        """
        self._recording = not self._broken and self._wait(*entries)
        self._jobs.put(_Begin(base, tuple(entries)) if self._recording else _GAP)

    def _wait(self, *entries: Entry) -> bool:
        """Count entries that wait; returns False, and counts none, where they would be too many."""
        num_bytes = sum(each.num_bytes for each in entries)
        with self._lock:
            if self._waiting_bytes and self._waiting_bytes + num_bytes > self._most_waiting_bytes:
                return False
            self._waiting_bytes += num_bytes
            return True

    def drop(self, oldest: int) -> None:
        """Remove segments that no checkpoint from step `oldest` on needs; returns at once."""
        self._jobs.put(_Drop(oldest))

    def synced(self) -> "Future[None]":
        """Return a future that is done when all that was recorded is on disk, or cannot be brought there; it never fails."""
        done: Future[None] = Future()
        self._jobs.put(_Sync(done))
        return done

    def close(self) -> None:
        """Write what waits, and end the thread, unless the disk takes nothing for 10 s."""
        self._closing.set()
        self._jobs.put(None)
        self._thread.join(_CLOSE_S)

    def _work(self) -> None:
        with Caught() as caught:
            self._do_jobs()
            return
        self._broken, self._recording = True, False
        self._tell(f"the journal has ended, {describe(caught.take())}; a restart goes on from what was recorded until now")

    def _do_jobs(self) -> None:
        while (job := self._next()) is not None:
            match job:
                case _Begin(base, entries):
                    self._files.end_segment(base, after_gap=self._gap)
                    self._gap = False
                    for entry in entries:
                        self._record(entry)
                case _Drop(oldest):
                    self._attempt(partial(self._files.drop, oldest))
                case _Sync(done):
                    is_awaited = done.set_running_or_notify_cancel()  # from here on it cannot be cancelled
                    self._attempt(self._files.sync)
                    if is_awaited:
                        done.set_result(None)
                case _Gap():
                    self._gap = True
                case _:
                    self._record(job)
            self.num_bytes, self.cpu_s = self._files.num_bytes, time.thread_time()
        self._attempt(self._files.close)

    def _next(self) -> "_Job | None":
        """Return the next job; None at the end."""
        while True:
            try:
                return self._jobs.get(timeout=self._files.seconds_to_sync(self._sync_s))
            except queue.Empty:
                self._attempt(self._files.sync)

    def _record(self, entry: Entry) -> None:
        """Write an entry, as soon as the disk takes it; once one is left out, because the run ends, so are all later ones."""
        if not self._gap and (data := self._encoded(entry)) is not None:
            last = False
            while not self._attempt(partial(self._files.write, data)):
                if last:
                    self._gap = True
                    break
                last = self._closing.wait(_RETRY_S)
        with self._lock:
            self._waiting_bytes -= entry.num_bytes

    def _encoded(self, entry: Entry) -> bytes | None:
        """Return an entry's bytes. Where it has none, which is a defect, recording ends and the run goes on."""
        with Caught() as caught:
            return entry.to_bytes()
        self._gap = True
        self._tell(f"the journal has ended at a record without bytes, {describe(caught.take())}; it begins anew at the next checkpoint")
        return None

    def _attempt(self, work: Hook) -> bool:
        """Do some work on files; returns whether the disk let it. The first failure is told, and the first success after it."""
        trouble = ""
        try:
            work()
        except OSError as exc:
            trouble = exc.strerror or str(exc)
        if trouble and not self._trouble:
            self._tell(f"the journal cannot be written: {trouble}; it is tried again, and a kill loses what waits")
        elif self._trouble and not trouble:
            self._tell("the journal is written again, and complete")
        self._trouble = trouble
        return not trouble


class _Files:
    """The segments that a writer appends to. Errors are those of the operating system; a call that failed may be made again."""

    def __init__(self, folder: Path) -> None:
        self.num_bytes = 0
        self._folder = folder
        self._base: int | None = None
        self._file: int | None = None
        self._length = 0
        self._number = max(numbers(folder), default=-1) + 1
        self._following = first_of_process(self._number)
        self._unsynced_since: float | None = None

    def end_segment(self, base: int, *, after_gap: bool) -> None:
        """Let the next record begin a segment, at the checkpoint of step `base`; `after_gap` skips a number, which readers notice."""
        with suppress(OSError):
            self.close()
        self._base = base
        self._following += after_gap

    def write(self, data: bytes) -> None:
        """Append a record."""
        if self._file is None:
            self._open_segment()
        assert self._file is not None, "it has just been opened"
        try:
            _write_all(self._file, frame(self._following, data) + data)
        except OSError:
            self._cut()
            raise
        self._length += FRAME_BYTES + len(data)
        self.num_bytes += FRAME_BYTES + len(data)
        self._following += 1
        self._unsynced_since = self._unsynced_since or time.monotonic()

    def seconds_to_sync(self, every_s: float) -> float | None:
        """Return the time until the next sync is due; None if there is nothing to sync."""
        return None if self._unsynced_since is None else max(self._unsynced_since + every_s - time.monotonic(), 0.0)

    def sync(self) -> None:
        """Bring what was written to disk."""
        if self._file is not None and self._unsynced_since is not None:
            # A sync that failed is not tried before there is more to sync: the next one would report success without having done it.
            self._unsynced_since = None
            os.fdatasync(self._file)

    def drop(self, oldest: int) -> None:
        """Remove the segments that no checkpoint from step `oldest` on needs."""
        needed = first_needed(self._folder, oldest=oldest)
        for number in numbers(self._folder):
            if needed is not None and number < needed:
                path_of(self._folder, number).unlink(missing_ok=True)

    def close(self) -> None:
        """Sync and close the segment."""
        file, self._file = self._file, None
        if file is not None:
            try:
                os.fdatasync(file)
            finally:
                self._unsynced_since = None
                os.close(file)

    def _open_segment(self) -> None:
        make_folder(self._folder)
        path = path_of(self._folder, self._number)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._number += 1
        try:
            _write_all(self._file, header(self._number - 1, base=self._base, first=self._following))
            sync(self._folder)
        except OSError:
            self._abandon()
            path.unlink(missing_ok=True)
            raise
        self._length, self._base = HEADER_BYTES, None

    def _cut(self) -> None:
        """Remove half a record; where that fails, the next record begins a new segment."""
        assert self._file is not None, "a record was being written"
        try:
            os.ftruncate(self._file, self._length)
            os.lseek(self._file, self._length, os.SEEK_SET)
        except OSError:
            self._abandon()

    def _abandon(self) -> None:
        file, self._file = self._file, None
        self._unsynced_since = None
        if file is not None:
            with suppress(OSError):
                os.close(file)


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left):]
