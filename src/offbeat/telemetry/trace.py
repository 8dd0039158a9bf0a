"""Timeline of a run in `trace.json`, which Perfetto (ui.perfetto.dev) and chrome://tracing open and the report draws.

The controller records its own spans and those that workers report. Times are wall-clock seconds (`time.time()`), so that spans of all
processes of a machine align. The file is a JSON array that is appended to line by line. Its closing bracket is written at the end and
taken off again by a run that goes on; the format allows that it is missing, so that the file can be opened during a run and after a crash.
One thread writes.
"""

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from offbeat.errors import StorageError
from offbeat.phase import phase
from offbeat.telemetry.jsonl import parse_row
from offbeat.telemetry.mend import mend
from offbeat.types import Tell

_END = b'{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "offbeat"}}]\n'
"""The last line of a trace that was closed. It has no comma behind it, so that the whole file is valid JSON."""

_SEAM_BYTES = 4096
"""Number of bytes before the last position that are compared, to know whether a file has only grown."""

_LATEST_US = 2**53
"""The year 2255 in microseconds, and the largest integer that every reader of the format represents exactly."""


@dataclass(frozen=True)
class Span:
    """An interval on a named track; times are in wall-clock seconds."""

    name: str
    track: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)


class Tracer:
    """Writes spans as they end; without a path, nothing is recorded. For `mended` see `JsonLinesFile`."""

    def __init__(self, path: Path | None, *, tell: Tell = lambda _text: None) -> None:
        """Append to the trace at `path`, or start it; tracks of an earlier run keep their places.

        `tell` gets a sentence when spans are lost, as on a full disk, which ends no run. Raises StorageError if the file cannot be opened.
        """
        self._tids: dict[str, int] = {}
        self._file = None
        self._tell = tell
        self._torn = False
        """Whether the last line could not be written, or only a part of it."""
        self.mended = ""
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _take_off_end(path)
            self.mended = mend(path, lambda line: line == b"[" or _parse_event(line) is not None)
            self._tids = {event["args"]["name"]: event["tid"] for event in _read_events(path) if event["ph"] == "M"}
            self._file = path.open("ab", buffering=0)
            if self._file.tell() == 0:
                self._file.write(b"[\n")
        except OSError as exc:
            raise StorageError(f"cannot write {path}: {exc.strerror}; free space, or turn the time line off with telemetry.trace") from exc

    @contextmanager
    def span(self, name: str, track: str, **args: Any) -> Iterator[None]:
        """Record the body as a span, even if it raises an error; it is also a phase of this process."""
        start_s = time.time()
        try:
            with phase(name):
                yield
        finally:
            self.add(name, track, start_s, time.time(), args)

    def add(self, name: str, track: str, start_s: float, end_s: float, args: Mapping[str, Any] | None = None) -> None:
        """Record a span that has ended, on a track such as "controller", "engine 0" or "rank 0"; times are in wall-clock seconds."""
        if self._file is None:
            return
        if track not in self._tids:
            self._tids[track] = tid = len(self._tids) + 1
            self._write_span({"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": track}})
            self._write_span({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": tid, "args": {"name": track, "sort_index": tid}})
        start_us, duration_us = round(start_s * 1e6), max(0, round((end_s - start_s) * 1e6))
        event = {"ph": "X", "name": name, "pid": 1, "tid": self._tids[track], "ts": start_us, "dur": duration_us}
        self._write_span(event | ({"args": dict(args)} if args else {}))

    def close(self) -> None:
        """Make the file valid JSON and close it; later spans are dropped."""
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError), file:  # on a full disk the bracket is missing, which the format allows
                file.write(_END)

    def _write_span(self, event: Mapping[str, Any]) -> None:
        assert self._file is not None, "a tracer without a file wrote an event"
        line = b"\n" * self._torn + f"{json.dumps(event, default=str)},\n".encode()  # behind a part of a line it is one of its own
        try:
            whole, why = self._file.write(line) == len(line), "the disk is full"
        except OSError as exc:
            whole, why = False, str(exc.strerror)
        if not whole and not self._torn:
            self._tell(f"the time line in {self._file.name} has gaps: {why}; free space, or turn it off with telemetry.trace")
        self._torn = not whole


def _take_off_end(path: Path) -> None:
    """Remove the last line that `Tracer.close` has written, if it is there."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - len(_END)))
        if file.read() == _END:
            file.truncate(size - len(_END))


class TraceReader:
    """Reads a trace that grows, on any thread: each time only the appended lines, and everything again where it is not a continuation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._forget()

    def read(self) -> list[Span]:
        """Return all spans so far, in the order written, [] if there are none. Other lines, such as a torn last one, are skipped."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    if not self._goes_on(file):
                        self._forget()
                    file.seek(self._offset)
                    appended = file.read()
                    self._file_id = _file_id(file)
            except OSError:
                self._forget()
                return []
            end = appended.rfind(b"\n") + 1
            torn = appended[end:]
            self._add(appended[:end].splitlines())
            self._offset += end
            self._seam = (self._seam + appended[max(end - _SEAM_BYTES, 0) : end])[-_SEAM_BYTES:]
            whole = _parse_event(torn) if torn else None  # the last line may lack its line break
            last = _span(whole, self._tracks) if whole is not None else None
            return [*self._spans, *([last] if last is not None else [])]

    def _goes_on(self, file: IO[bytes]) -> bool:
        """Whether this is the file that was read, with the last bytes that were read still in their place."""
        file.seek(self._offset - len(self._seam))
        return _file_id(file) == self._file_id and file.read(len(self._seam)) == self._seam

    def _add(self, lines: Iterable[bytes]) -> None:
        for event in filter(None, map(_parse_event, lines)):
            if event["ph"] == "M":
                self._tracks[event["tid"]] = event["args"]["name"]
            elif (span := _span(event, self._tracks)) is not None:
                self._spans.append(span)

    def _forget(self) -> None:
        self._file_id: tuple[int, int] | None = None
        self._offset, self._seam = 0, b""
        self._tracks: dict[int, str] = {}
        self._spans: list[Span] = []


def _file_id(file: IO[bytes]) -> tuple[int, int]:
    stat = os.fstat(file.fileno())
    return stat.st_dev, stat.st_ino


def _span(event: Mapping[str, Any], tracks: Mapping[int, str]) -> Span | None:
    """Return the span of an event; None for other events, and for a track without a name."""
    if event["ph"] != "X" or event["tid"] not in tracks:
        return None
    return Span(event["name"], tracks[event["tid"]], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, event.get("args", {}))


def read_trace(path: Path) -> list[Span]:
    """Return the spans of a trace; see `TraceReader.read`."""
    return TraceReader(path).read()


def _read_events(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return [event for line in file if (event := _parse_event(line)) is not None]


def _parse_event(line: bytes) -> dict[str, Any] | None:
    """Parse one of our events: a track's name or place, or a span; None for anything else, such as the bracket in the first line."""
    event = parse_row(line.strip().removesuffix(b","))
    if event is None:
        return None
    kind, args = event.get("ph"), event.get("args", {})
    if not isinstance(event.get("name"), str) or not isinstance(event.get("tid"), int) or not isinstance(args, dict):
        return None
    if kind == "M":
        return event if isinstance(args.get("name"), str) else None
    times = (event.get("ts"), event.get("dur"))
    return event if kind == "X" and all(isinstance(time, int) and 0 <= time < _LATEST_US for time in times) else None
