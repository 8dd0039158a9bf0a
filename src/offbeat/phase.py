"""Announces the current work of this process in words: `with phase("load batch 17"):`. Called wherever a long piece of work begins.

When a sync point is missed, the verdict quotes the innermost phase of each missing rank, how long the rank has been in it, and the Python
stack of the thread that entered it. The console shows the current phase. Any thread may enter phases; entering one costs a list append.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_MAX_FRAMES = 12
"""Number of innermost stack frames shown in a verdict: enough to get from a library's internals back to the code that called it."""

_MAX_NAMES = 4
"""Largest number of awaited peers that are named."""


@dataclass(frozen=True, eq=False)
class Mark:
    """One entered phase.

    Attributes:
        name: the name given; empty outside any phase.
        since_s: time.monotonic() at entry.
        thread: identifier of the thread that entered the phase.
        describe: returns the progress within the phase.
    """

    name: str
    since_s: float
    thread: int
    describe: Callable[[], str] | None = None

    @property
    def text(self) -> str:
        """The name and the progress, such as "waiting for rollouts: 3 of 8 groups are ready"."""
        if self.describe is None:
            return self.name
        try:
            return f"{self.name}: {self.describe()}"
        except Exception as exc:  # It is called from another thread and may see data that is changing; the name alone still helps.
            return f"{self.name}: unknown how far ({type(exc).__name__}: {exc})"


_outside = Mark("", time.monotonic(), threading.main_thread().ident or 0)
_marks: list[Mark] = []


@contextmanager
def phase(name: str, *, describe: Callable[[], str] | None = None) -> Iterator[None]:
    """Announce the work of this process until the end of the block; phases nest. Another thread may call `describe`."""
    mark = Mark(name, time.monotonic(), threading.get_ident(), describe)
    _marks.append(mark)
    try:
        yield
    finally:
        _marks.remove(mark)


@contextmanager
def waiting_for(name: str, whom: Iterable[str]) -> Iterator[Callable[[str], None]]:
    """Announce that this process waits for others until the end of the block; yields a function to call with each one that is done."""
    awaited = dict.fromkeys(whom)

    def describe() -> str:
        names = list(awaited)
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        return f"waiting for {', '.join(names[:_MAX_NAMES])}{more}" if names else "done"

    with phase(name, describe=describe):
        yield lambda who: awaited.pop(who, None)


def marks() -> tuple[Mark, ...]:
    """Return all phases that have not ended, of all threads, in the order in which they were entered."""
    return tuple(_marks)


def current() -> Mark:
    """Return the most recently entered phase, of any thread, that has not ended; outside any phase, a nameless one of the main thread."""
    try:
        return _marks[-1]
    except IndexError:  # another thread may leave the last phase at any moment
        return _outside


def stack(thread: int) -> tuple[str, ...]:
    """Return the innermost calls of a thread, one line each, innermost last; empty when there is no such thread."""
    frame = sys._current_frames().get(thread)
    frames = traceback.extract_stack(frame, limit=_MAX_FRAMES) if frame else []
    return tuple(f"{_short(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames)


def _short(filename: str) -> str:
    return str(Path(*Path(filename).parts[-3:]))
