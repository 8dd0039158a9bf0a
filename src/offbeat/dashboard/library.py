"""Runs that the live page shows: found by name, read again when their files have changed, with an index of each one's rollouts.

Clients name runs that were found in the given folders, such as "words", and never paths. Only the index of a run's rollouts is written.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offbeat.dashboard.rollout_index import IndexProgress, RolloutIndex
from offbeat.dashboard.run_files import TRACE, RunFiles, is_evaluation, is_run, read_run
from offbeat.dashboard.warm_up import STEP_EVENT
from offbeat.data.stored_rollouts import kept_files
from offbeat.errors import DataError
from offbeat.telemetry.evaluation_log import RESULT_NAME
from offbeat.telemetry.jsonl import parse_row
from offbeat.telemetry.run_lock import is_running
from offbeat.telemetry.trace import TraceReader

_FILES = ("config.toml", "metrics.jsonl", "events.jsonl", TRACE, "result.json", RESULT_NAME)
_TAIL_BYTES = 1 << 16
_LOOK_S = 1.0
_LATELY_S = 600.0
"""Longer than most steps take."""

Stamp = tuple[tuple[int, int], ...]
"""Size and time of change of each file of a run; equal stamps mean equal contents."""


@dataclass(frozen=True)
class Summary:
    """One run in the list of runs.

    Attributes:
        last_step: newest step of the metrics; None before the first.
        warm_up_step: newest step of its supervised warm-up; None without one, or once the metrics have begun.
        is_evaluation: whether it is a folder of `offbeat eval`, not of a run.
        changed_s: when one of the files last changed, in wall-clock seconds.
        is_over: whether it has the result of its last step.
        is_live: whether a process runs it; where that cannot be told, whether it is not over and has written something lately.
    """

    name: str
    last_step: int | None
    warm_up_step: int | None
    is_evaluation: bool
    changed_s: float
    is_over: bool
    is_live: bool


class RunLibrary:
    """The runs in some folders. Methods may be called on any thread."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Prepare a library of runs, or folders of runs; raises DataError if a folder does not exist. Later runs are found, too."""
        for folder in folders:
            if not folder.is_dir():
                raise DataError(f"folder {folder} does not exist; give a run's folder such as runs/NAME, or a folder of runs")
        self._folders = tuple(folders)
        self._read: dict[Path, tuple[Stamp, RunFiles]] = {}
        self._traces: dict[Path, TraceReader] = {}
        self._indexes: dict[Path, _KeptIndex] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def close(self) -> None:
        """End the building of indexes."""
        self._stop.set()
        for index in self._indexes.values():
            index.close()

    def runs(self) -> dict[str, Path]:
        """Return the folders of all runs by name; of two with the same name, the second is called "name (2)"."""
        found: dict[str, Path] = {}
        for folder in self._folders:
            for path in _runs_in(folder):
                name = unique = path.resolve().name
                number = 2
                while unique in found:
                    unique, number = f"{name} ({number})", number + 1
                found[unique] = path
        return found

    def folder(self, name: str) -> Path:
        """Return a run's folder; raises DataError if there is no run of this name."""
        found = self.runs()
        if name not in found:
            raise DataError(f"there is no run {name[:80]!r} here; there is {', '.join(found) or 'none yet'}")
        return found[name]

    def summaries(self) -> list[Summary]:
        """Return all runs, those that changed last first."""
        found = [_summary(name, path) for name, path in self.runs().items()]
        return sorted(found, key=lambda each: -each.changed_s)

    def is_live(self, name: str) -> bool:
        """Return whether a process runs the run; see `Summary`. Raises DataError if there is no such run."""
        return _summary(name, self.folder(name)).is_live

    def stamp(self, name: str) -> str:
        """Return a text that differs as soon as a file of the run, or of its rollouts, has changed."""
        folder = self.folder(name)
        files = kept_files(folder)
        newest = _size_and_time(files[-1].path)[1] if files else 0
        return "-".join(f"{size}.{mtime}" for size, mtime in (*_stamp(folder), (len(files), newest)))

    def read(self, name: str) -> RunFiles:
        """Return a run's records; raises DataError if there is no such run."""
        folder = self.folder(name)
        stamp = _stamp(folder)
        with self._lock:
            known = self._read.get(folder)
            trace = self._traces.setdefault(folder, TraceReader(folder / TRACE))
        if known is None or known[0] != stamp:
            known = (stamp, read_run(folder, trace=trace))
            with self._lock:
                self._read[folder] = known
        return known[1]

    def rollouts(self, name: str) -> tuple[RolloutIndex, IndexProgress]:
        """Return the index of a run's rollouts and its progress; a thread continues to build it. Raises as `folder`."""
        folder = self.folder(name)
        with self._lock:
            kept = self._indexes.get(folder)
            if kept is None:
                kept = self._indexes[folder] = _KeptIndex(folder, self._stop)
        return kept.index, kept.look()


class _KeptIndex:
    """An index and the thread that extends it. The thread consumes new files, and ends when there are none."""

    def __init__(self, folder: Path, stop: threading.Event) -> None:
        self.index = RolloutIndex(folder)
        self._stop = stop
        self._thread: threading.Thread | None = None
        self._looked_s = 0.0
        self._lock = threading.Lock()

    def look(self) -> IndexProgress:
        """Begin to extend the index, unless that was done just now; the newest step is in it when this returns."""
        with self._lock:
            now = time.monotonic()
            if (self._thread is None or not self._thread.is_alive()) and now - self._looked_s >= _LOOK_S:
                self._looked_s = now
                self.index.update(most_files=2, stop=self._stop)
                self._thread = threading.Thread(target=self._build, name="rollout-index", daemon=True)
                self._thread.start()
        return self.index.progress()

    def _build(self) -> None:
        with suppress(sqlite3.OperationalError, OSError):  # the run was moved aside meanwhile; the next look begins again
            self.index.update(stop=self._stop)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self.index.close()


def _runs_in(folder: Path) -> list[Path]:
    """Return the folder if it is a run, or else the runs in it; none if it is gone or cannot be read."""
    try:
        return [folder] if is_run(folder) else sorted(path for path in folder.iterdir() if path.is_dir() and is_run(path))
    except OSError:
        return []


def _stamp(folder: Path) -> Stamp:
    return tuple(_size_and_time(folder / name) for name in _FILES)


def _size_and_time(path: Path) -> tuple[int, int]:
    """Return size and time of change of a file; (-1, 0) if it is not there."""
    try:
        stat = path.stat()
    except OSError:
        return -1, 0
    return stat.st_size, stat.st_mtime_ns


def _summary(name: str, folder: Path) -> Summary:
    changed_s = max(mtime_ns for _, mtime_ns in _stamp(folder)) / 1e9
    last_step = _last_number(folder / "metrics.jsonl", "global_step")
    is_over = _has_ended(folder, last_step)
    running = is_running(folder)
    if running is None:
        running = not is_over and time.time() - changed_s < _LATELY_S
    return Summary(
        name, last_step, _last_number(folder / "events.jsonl", "step", kind=STEP_EVENT) if last_step is None else None,
        is_evaluation(folder), changed_s, is_over=is_over and not running, is_live=running)


def _has_ended(folder: Path, last_step: int | None) -> bool:
    """Whether the run has a result, and no step was recorded after it. Times of files say nothing: a copied run may have any."""
    if (folder / RESULT_NAME).is_file():
        return True
    try:
        result = json.loads((folder / "result.json").read_bytes())
    except (OSError, ValueError):
        return False
    steps = result.get("steps") if isinstance(result, dict) else None
    return last_step is None or not isinstance(steps, int) or steps >= last_step


def _last_number(path: Path, name: str, *, kind: str | None = None) -> int | None:
    """Return a number from the last complete line, or the last of a kind, of a run's file; None if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    rows = filter(None, map(parse_row, reversed(lines)))
    number = next((row.get(name) for row in rows if row.get("kind") == kind), None)
    return number if isinstance(number, int) else None
