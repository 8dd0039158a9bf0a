"""What this process is doing, in words: `with phase("load batch 17"):`. Called by whoever starts a long piece of work.

A verdict on a missed sync point quotes the innermost phase of a missing rank, how long it has been in it, and the Python stack of the
thread that entered it. Any thread may enter phases; entering one costs a list append.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_MAX_FRAMES = 12
"""Innermost frames of a stack that a verdict shows: enough to get from a library's innards back to the code that called it."""


@dataclass(frozen=True, eq=False)
class Mark:
    """One entered phase.

    Attributes:
        name: as given; empty outside of any phase.
        since_s: time.monotonic() at entry.
        thread: identifier of the thread that entered it.
        describe: says how far it is.
    """

    name: str
    since_s: float
    thread: int
    describe: Callable[[], str] | None = None

    @property
    def text(self) -> str:
        """The name, and how far it is: "waiting for rollouts: 3 of 8 groups are ready"."""
        if self.describe is None:
            return self.name
        try:
            return f"{self.name}: {self.describe()}"
        except Exception as exc:  # Asked from another thread, it may look at what is just changing; the name still helps.
            return f"{self.name}: unknown how far ({type(exc).__name__}: {exc})"


_outside = Mark("", time.monotonic(), threading.main_thread().ident or 0)
_marks: list[Mark] = []


@contextmanager
def phase(name: str, *, describe: Callable[[], str] | None = None) -> Iterator[None]:
    """Say what this process does from here to the end of the block; phases nest. `describe` is asked from another thread, if ever."""
    mark = Mark(name, time.monotonic(), threading.get_ident(), describe)
    _marks.append(mark)
    try:
        yield
    finally:
        _marks.remove(mark)


def current() -> Mark:
    """The phase entered last and not left yet, of any thread; before the first, a nameless one of the main thread."""
    try:
        return _marks[-1]
    except IndexError:  # Another thread may leave the last one at any moment.
        return _outside


def stack(thread: int) -> tuple[str, ...]:
    """Where a thread is: its innermost calls, innermost last, one line each; empty when there is no such thread."""
    frame = sys._current_frames().get(thread)
    frames = traceback.extract_stack(frame, limit=_MAX_FRAMES) if frame else []
    return tuple(f"{_short(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames)


def _short(filename: str) -> str:
    return str(Path(*Path(filename).parts[-3:]))
