"""Repairs files of lines with foreign text in them: valid lines stay, and the original file is kept beside it.

Called when a run opens its records. An incomplete last line, as a crash leaves it, is removed silently.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from offbeat.disk import replacing

IsSound = Callable[[bytes], bool]
"""Whether a line is whole."""


def mend(path: Path, is_sound: IsSound) -> str:
    """Keep only the sound lines of a file, if it exists; returns a sentence on the repair, "" if all complete lines were sound.

    Lines are judged without their line breaks. Raises OSError if the file cannot be read or written.
    """
    if not path.is_file():
        return ""
    num_bad = end = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                end += len(line)
                num_bad += not is_sound(line[:-1])
    if not num_bad:
        if end < path.stat().st_size:
            os.truncate(path, end)
        return ""
    aside = keep_aside(path)
    _write_sound(aside, path, is_sound)
    lines = "1 line that is" if num_bad == 1 else f"{num_bad} lines that are"
    return f"{path.name} had {lines} no record, now left out; the file as it was is kept as {aside.name}"


def keep_aside(path: Path) -> Path:
    """Copy a file to the next free name in its folder, and return the copy's path."""
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while aside.exists():
        aside, number = path.with_name(f"{path.name}.damaged.{number}"), number + 1
    shutil.copyfile(path, aside)
    return aside


def _write_sound(source: Path, target: Path, is_sound: IsSound) -> None:
    """Copy the sound lines; a crash meanwhile leaves the target as it was."""
    with source.open("rb") as old, replacing(target) as new:
        new.writelines(line for line in old if line.endswith(b"\n") and is_sound(line[:-1]))
