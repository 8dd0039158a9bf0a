"""Describes errors in the user's own code: with their place, for a sentence, and in full, for the log of the process that called it.

Exceptions cross processes as text, so the place is put into the text by the process in which the code ran.
"""

import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from offbeat.errors import describe

_NOT_OWN = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parent, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_CELLS = (f"{os.sep}ipykernel_", "<ipython-input-")
"""Parts of the file names of a notebook's cells."""
_TYPED = ("<stdin>", "<ipython-input-")
"""Beginnings of the names of typed code; other names in angle brackets belong to code made at run time, such as "<string>"."""
_MOST_FRAMES, _MOST_CHARACTERS, _MOST_KINDS = 20, 20_000, 50


def place_of(exc: BaseException) -> str:
    """Return file and line of the innermost frame in the user's own code, as in "rewards.py, line 2"; empty if there is none.

    Code that was made at run time, by `eval` for example, has no file, and its caller is named instead.
    A file below the working directory is named from there. A function that was sent from a script or a notebook has the name of that file,
    or is in "a cell of the notebook".
    """
    for raised in (exc, exc.__cause__):  # the two may be the same
        if place := place_in(traceback.walk_tb(raised.__traceback__ if raised else None)):
            return place
    return ""


def place_in(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Like `place_of`, for frames with their lines, outermost first."""
    for frame, line in reversed([*frames]):
        if is_own(file := frame.f_code.co_filename) and (not file.startswith("<") or file.startswith(_TYPED)):
            return f"{_shown(file)}, line {line}"
    return ""


def is_own(file: str) -> bool:
    """Whether a code object's file name belongs to the user's own code, and not to Offbeat, Python or an installed package."""
    return not (file.startswith((*_NOT_OWN, "<frozen ")) or any(part in file for part in _INSTALLED))


def describe_at(exc: BaseException) -> str:
    """Describe an exception as `describe` does, and add where in the user's own code it was raised, if that is known."""
    place = place_of(exc)
    return f"{describe(exc)} at {place}" if place else describe(exc)


def traceback_of(exc: BaseException) -> str:
    """Return the innermost frames of an exception, and the exception, as lines for a log."""
    text = "".join(traceback.format_exception(exc, limit=-_MOST_FRAMES))
    return text[:_MOST_CHARACTERS].encode("utf-8", "backslashreplace").decode()


class FirstTracebacks:
    """Gives the traceback of the first exception of each kind, so that the same failure in each sample does not flood a log."""

    def __init__(self) -> None:
        self._kinds: set[tuple[type[BaseException], str]] = set()

    def take(self, exc: BaseException) -> str:
        """Return the traceback of an exception; "" after the first of its class and place, or if there were many kinds."""
        kind = (type(exc), place_of(exc))
        if kind in self._kinds or len(self._kinds) >= _MOST_KINDS:
            return ""
        self._kinds.add(kind)
        return traceback_of(exc)


def _shown(file: str) -> str:
    if any(part in file for part in _CELLS):
        return "a cell of the notebook"
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):  # not below it, or it is gone
        return file
