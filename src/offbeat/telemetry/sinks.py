"""Where committed statistics go. The `StatsLogger` writes each row to every sink; one sink here is the run's `metrics.jsonl`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from offbeat.telemetry.jsonl import JsonLinesFile


class Sink(Protocol):
    """A destination of statistics."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Take one row: epoch, step, global_step, time_s, and the statistics by name."""

    def resume_at(self, global_step: int) -> None:
        """Forget rows with this global step or a later one; the run is about to write them again."""

    def close(self) -> None:
        """Write what is held back and let go."""


class JsonLines:
    """A `Sink` that appends to a file of JSON lines; what it wrote before stays, less the rows that a resumed run repeats."""

    def __init__(self, path: Path) -> None:
        self._file = JsonLinesFile(path)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one flushed line."""
        self._file.write(row)

    def resume_at(self, global_step: int) -> None:
        """Drop rows with this global step or a later one."""
        self._file.keep(lambda row: row["global_step"] < global_step)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
