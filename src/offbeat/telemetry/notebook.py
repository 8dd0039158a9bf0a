"""Text in one output of a notebook's cell, which is written anew as it grows; printed lines would each be an output of their own.

Called by the console. IPython is there where a notebook is, and is imported only then.
"""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from offbeat.types import Clock

_MOST_PASSING = 8
_MOST_LINES = 200
_EVERY_S = 0.3
"""Shorter than it takes to read a line, and long enough that quick steps do not fill the channel to the browser."""

Show = Callable[[str], Callable[[str], object]]


def is_notebook(stream: TextIO) -> bool:
    """Whether text written to a stream appears below the cell of a notebook."""
    return "ipykernel" in sys.modules and type(stream).__module__ == "ipykernel.iostream"


def show_in_cell(text: str) -> Callable[[str], object]:
    """Show text below the cell that runs now; returns a function that replaces it."""
    from IPython.display import DisplayHandle  # noqa: PLC0415 - of the notebook; nothing else needs it

    handle = DisplayHandle()
    handle.display({"text/plain": text}, raw=True)
    return lambda newer: handle.update({"text/plain": newer}, raw=True)


class CellOutput:
    """Lines of text in one output. The newest lines of steps are kept, and of all others the newest `_MOST_LINES`."""

    def __init__(self, show: Show = show_in_cell, *, clock: Clock = time.monotonic) -> None:
        """Prepare the output, which appears with its first line."""
        self._show = show
        self._clock = clock
        self._replace: Callable[[str], object] | None = None
        self._lines: list[tuple[str, bool]] = []
        self._passing_s = float("-inf")
        self._is_behind = False

    def add(self, line: str, *, passing: bool = False) -> None:
        """Append a line. Beyond a bound the oldest `passing` ones are dropped; one soon after another is shown with the next."""
        self._lines.append((line, passing))
        if passing and sum(each for _, each in self._lines) > _MOST_PASSING:
            self._lines.remove(next(each for each in self._lines if each[1]))
        del self._lines[:-_MOST_LINES]
        self._is_behind = True
        now_s = self._clock()
        if not passing or now_s - self._passing_s >= _EVERY_S:
            self._passing_s = now_s if passing else self._passing_s
            self.flush()

    def flush(self) -> None:
        if not self._is_behind:
            return
        text = "\n".join(line for line, _ in self._lines)
        if self._replace is None:
            self._replace = self._show(text)
        else:
            self._replace(text)
        self._is_behind = False
