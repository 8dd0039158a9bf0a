"""Events of a run besides its steps (publishes, faults, quarantines, failures), recorded in order in `events.jsonl`."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offbeat.telemetry.jsonl import JsonLinesFile


class EventLog:
    """An append-only file, none without a path; resumed runs remove nothing. `listeners` get the kind and the fields of every event."""

    def __init__(self, path: Path | None) -> None:
        self.listeners: list[Callable[[str, dict[str, Any]], None]] = []
        self._file = None if path is None else JsonLinesFile(path, is_row=lambda row: isinstance(row.get("kind"), str))
        self.mended = self._file.mended if self._file is not None else ""

    def record(self, kind: str, **fields: Any) -> None:
        """Append one event with the wall-clock time as `time_s`, in seconds since 1970; values that JSON does not support become text."""
        if self._file is not None:
            self._file.write({"time_s": round(time.time(), 3), "kind": kind, **fields})
        for hear in self.listeners:
            hear(kind, fields)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
