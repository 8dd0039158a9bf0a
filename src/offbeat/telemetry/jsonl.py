"""Append-only files of one JSON object per line, the form of a run's records.

Lines are flushed as they are written, so a crash loses at most the line it interrupts; opening the file again drops such a torn line.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offbeat.errors import StorageError

_BLOCK_BYTES = 65_536


class JsonLinesFile:
    """One file, created with its folder if need be, and appended to."""

    def __init__(self, path: Path) -> None:
        """Open for appending.

        Raises:
            StorageError: the folder or the file cannot be written.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            cut_torn_line(path)
            self._file = path.open("ab")
        except OSError as exc:
            raise _cannot_write(path, exc) from exc

    def write(self, row: Mapping[str, Any]) -> None:
        """Append and flush one object. Numbers that JSON has no word for (NaN, infinities) become null.

        Raises:
            StorageError: the disk is full or gone.
        """
        line = json.dumps({key: _json_safe(value) for key, value in row.items()}, ensure_ascii=False, default=str)
        try:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        except OSError as exc:
            raise _cannot_write(self.path, exc) from exc

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the rows that are not wanted; a crash in between leaves the old file whole."""
        rows = [row for row in read_json_lines(self.path) if wanted(row)]
        self._file.close()
        shorter = self.path.with_name(f".{self.path.name}.tmp")
        shorter.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        shorter.replace(self.path)
        self._file = self.path.open("ab")

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, [] if there is none. Lines that are no JSON object, as a crash leaves them, are passed over."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def cut_torn_line(path: Path) -> None:
    """Shorten a file to its last complete line, so that what is appended starts on a line of its own."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def _json_safe(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cannot_write(path: Path, exc: OSError) -> StorageError:
    return StorageError(f"cannot write {path}: {exc.strerror or exc}; free space or choose another folder with run.dir")
