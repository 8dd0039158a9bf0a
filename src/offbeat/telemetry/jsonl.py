"""Append-only files with one JSON object per line, the form of a run's records.

Lines are flushed as they are written, so a crash loses at most the line that it interrupts. Opening the file again drops such a torn line,
and lines that do not belong in the file.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offbeat.disk import replacing
from offbeat.errors import StorageError
from offbeat.telemetry.mend import mend

Row = dict[str, Any]

Chooses = Callable[[Row], bool]
"""Whether a row is one of those that are wanted."""


class JsonLinesFile:
    """One file, created with its folder if necessary, and appended to; `mended` tells the damage found and repaired at opening, or ""."""

    def __init__(self, path: Path, *, is_row: Chooses = lambda _row: True) -> None:
        """Open for appending; raises StorageError if the folder or the file cannot be written.

        An object for which `is_row` is false does not belong in the file. It is left out, and does not count as damage by a crash.
        """

        def is_sound(line: bytes) -> bool:
            row = parse_row(line)
            return row is not None and is_row(row)

        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.mended = mend(path, is_sound)
            self._file = path.open("ab")
        except OSError as exc:
            raise _cannot_write(path, exc) from exc

    def write(self, row: Mapping[str, Any]) -> None:
        """Append and flush one object, with null for NaN and infinities; raises StorageError if the disk is full or gone."""
        line = json.dumps({key: _json_safe(value) for key, value in row.items()}, ensure_ascii=False, default=str)
        try:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as exc:
            raise _cannot_write(self.path, exc) from exc

    def keep(self, wanted: Chooses) -> None:
        """Drop the other rows; a crash meanwhile leaves the old file intact. Raises StorageError if the disk is full or gone."""
        self._file.close()
        try:
            with self.path.open("rb") as old, replacing(self.path) as new:
                new.writelines(line for line in old if (row := parse_row(line)) is not None and wanted(row))
            self._file = self.path.open("ab")
        except OSError as exc:
            raise _cannot_write(self.path, exc) from exc

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()


def read_json_lines(path: Path) -> list[Row]:
    """Return the objects of a file, [] if there is no file. Lines that are not JSON objects, such as a crash leaves, are skipped."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return [row for line in file if (row := parse_row(line)) is not None]


def parse_row(line: bytes) -> Row | None:
    """Parse a line as a JSON object; None if it is not one."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deeply
        return None
    return row if isinstance(row, dict) else None


def _json_safe(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cannot_write(path: Path, exc: OSError) -> StorageError:
    return StorageError(f"cannot write {path}: {exc.strerror or exc}; free space or choose another folder with run.dir")
