"""Files of lines that something else has written into: what still reads as a line stays, and the file as it was is kept beside it.

Called when a run opens its records. A last line without its end is what a crash leaves, and is cut off without a word.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def mend(path: Path, is_sound: Callable[[bytes], bool]) -> str:
    """Leave nothing but sound lines in a file, if there is one.

    Args:
        is_sound: of a line without its end.

    Returns:
        What was done, in a sentence; "" where all whole lines were sound.

    Raises:
        OSError: the file cannot be read or written.
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
    """Copy a file to the next free name beside it."""
    aside, number = path.with_name(f"{path.name}.damaged"), 1
    while aside.exists():
        aside, number = path.with_name(f"{path.name}.damaged.{number}"), number + 1
    shutil.copyfile(path, aside)
    return aside


def _write_sound(source: Path, target: Path, is_sound: Callable[[bytes], bool]) -> None:
    """Copy the sound lines; a crash in between leaves the target as it was."""
    part = target.with_name(f".{target.name}.tmp")
    with source.open("rb") as old, part.open("wb") as new:
        new.writelines(line for line in old if line.endswith(b"\n") and is_sound(line[:-1]))
    part.replace(target)
