"""Signs of life of the thread that does a rank's work, and how its own process tells that it hangs.

    with work("train_step"):      # the thread that enters it is watched until the end of the block
        progress("backward")      # it has come to a place
        with waiting():           # from here it waits for others, under a deadline of their own

A thread is alive that comes to places, computes, moves data or waits for a disk, whether it does so itself or through threads of a library.
One that does nothing of that, and waits for no other rank either, hangs: a sleep, a lock, an answer that does not come. A victim of another
rank stands still, too, but inside a wait that is marked, or that torch's own frames show.

    Vigil    consumes signs of life; produces beats, and a `Hang`, once for each piece of work; waits for its clock alone
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from offbeat import phase

LOOK_S = 0.25
"""Between two looks."""

MARGIN_S = 0.25
"""On top of the patience with a thread that stands still. What others find out at a point of their own meanwhile says more than it does."""

_OWN_SHARE, _HELPERS_SHARE = 0.01, 0.05
"""Of a core: what a thread that computes uses at the least, and the threads of libraries beside it, some of which never rest entirely."""

_TASKS = Path("/proc/self/task")


class Work:
    """One piece of work of one thread.

    Attributes:
        name: as given, such as "train_step".
        at: the place that it came to last; "" before the first.
        still_s: for how long there was no sign of life, as the vigil has seen it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.at = ""
        self.still_s = 0.0
        self.thread = threading.get_ident()
        self._native = threading.get_native_id()
        self._steps = 0
        self._waits = 0
        self._strangers = {thread.native_id for thread in threading.enumerate()} - {self._native}

    @property
    def text(self) -> str:
        """The name and the place: "'train_step' (backward)"."""
        return repr(self.name) + (f" ({self.at})" if self.at else "")

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks, by a mark or by torch's frames."""
        return self._waits > 0 or in_collective(sys._current_frames().get(self.thread))

    def signs(self) -> "Signs":
        """What can be seen of it now."""
        return Signs.read(self._steps, self._native, self._strangers)


_works: list[Work] = []
_strikes: list[Callable[[str], object]] = []


def current() -> Work | None:
    """The work begun last and not ended yet, of any thread."""
    try:
        return _works[-1]
    except IndexError:
        return None


def _own() -> Work | None:
    ident = threading.get_ident()
    return next((one for one in reversed(_works) if one.thread == ident), None)


@contextmanager
def work(name: str) -> Iterator[None]:
    """This thread works from here to the end of the block, and is alive, or waits, all the while."""
    own = Work(name)
    _works.append(own)
    try:
        yield
    finally:
        _works.remove(own)


def progress(at: str) -> None:
    """This thread has come to a place, such as the next micro-batch or file; a word in snake case, by which drills strike there."""
    if own := _own():
        own._steps += 1
        own.at = at
    for strike in _strikes:
        strike(at)


@contextmanager
def waiting() -> Iterator[None]:
    """This thread waits for others to the end of the block, which has a deadline of its own."""
    own = _own()
    if own is None:
        yield
        return
    own._waits += 1
    try:
        yield
    finally:
        own._waits -= 1
        own._steps += 1


def on_progress(strike: Callable[[str], object]) -> None:
    """Call `strike` at every place, in the thread that comes there; for drills."""
    _strikes.append(strike)


def in_collective(frame: FrameType | None) -> bool:
    """Whether a thread whose innermost frame this is has called into torch for a collective, or for a backward pass, which ends in one.

    Torch's writer of checkpoints is among its distributed code, but writes files.
    """
    while frame is not None and "/torch/" in (file := frame.f_code.co_filename):
        if "/torch/distributed/" in file and "/torch/distributed/checkpoint/" not in file:
            return True
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class Signs:
    """What a look at a working thread has seen; counted from arbitrary starts.

    Attributes:
        steps: places that it came to.
        cpu_s: computed by itself.
        helpers_s: computed by threads that libraries have started, and by Python's that were started since the work began.
        moved: bytes that it has read and written, and pages that were read for it.
        on_disk: it waits for a disk at this moment.
    """

    steps: int
    cpu_s: float
    helpers_s: float = 0.0
    moved: int = 0
    on_disk: bool = False

    @classmethod
    def read(cls, steps: int, native: int, strangers: set[int | None]) -> "Signs":
        """Of the thread with this number of the system, without what the threads `strangers` do.

        Where the system does not say so much, whatever this process computes is a sign.
        """
        try:
            helpers = [int(task.name) for task in _TASKS.iterdir()]
        except OSError:
            return cls(steps, time.process_time())
        cpu_s = _cpu_s(native)
        helpers_s = sum(_cpu_s(task) for task in helpers if task != native and task not in strangers and task != threading.get_native_id())
        fields = _read(native, "stat").rpartition(")")[2].split()
        counts = dict(line.split(": ") for line in _read(native, "io").splitlines() if ": " in line)
        moved = sum(int(counts.get(name, 0)) for name in ("rchar", "wchar", "read_bytes")) + (int(fields[9]) if fields else 0)
        return cls(steps, cpu_s, helpers_s, moved, on_disk=bool(fields) and fields[0] == "D")

    def since(self, before: "Signs", seconds: float) -> bool:
        """Whether there was a sign of life in the seconds since an earlier look."""
        return (
            self.on_disk or self.steps != before.steps or self.moved != before.moved
            or self.cpu_s - before.cpu_s >= _OWN_SHARE * seconds or self.helpers_s - before.helpers_s >= _HELPERS_SHARE * seconds)


def _cpu_s(task: int) -> float:
    if text := _read(task, "schedstat"):
        return int(text.split()[0]) / 1e9
    fields = _read(task, "stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _read(task: int, name: str) -> str:
    try:
        return (_TASKS / str(task) / name).read_text()
    except OSError:  # the thread has ended, or the system does not say
        return ""


@dataclass(frozen=True)
class Hang:
    """A thread that hangs.

    Attributes:
        where: the work and the place.
        stack: innermost call last.
    """

    where: str
    still_s: float
    stack: tuple[str, ...]

    def text(self, name: str) -> str:
        """One sentence on the process of this name, and the stack."""
        head = f"{name} hangs in {self.where}: for {self.still_s:.1f} s it has computed nothing, moved no data and waited for no other rank"
        if not self.stack:
            return head
        return f"{head}, and stands at {self.stack[-1]}\n  {name}, innermost call last:" + "".join(f"\n    {line}" for line in self.stack)


class Stillness:
    """For how long a piece of work has stood still, from one look to the next, and whether it hangs. Pure."""

    def __init__(self, patience_s: float) -> None:
        self.still_s = 0.0
        self._patience_s = patience_s
        self._before: Signs | None = None
        self._stack: tuple[str, ...] | None = None

    def look(self, signs: Signs, seconds: float) -> bool:
        """Take in a look, `seconds` after the one before. Returns whether it has stood still for longer than the patience with it.

        A process that was stopped between two looks has not stood still for as long as its clock says.
        """
        seconds = min(seconds, 2 * LOOK_S)
        still = self._before is not None and not signs.since(self._before, seconds)
        self._before = signs
        self.still_s = self.still_s + seconds if still else 0.0
        if self.still_s < self._patience_s:
            self._stack = None
        return self.still_s >= self._patience_s

    def hangs(self, stack: tuple[str, ...], *, waits: bool) -> bool:
        """Whether one that has stood still for so long hangs, given where it stands now; two such stacks must be the same."""
        same, self._stack = stack == self._stack, None if waits else stack
        return same and not waits and self.still_s >= self._patience_s + MARGIN_S


class Vigil:
    """The thread of a process that beats for its work, and finds out when it hangs."""

    def __init__(self, *, patience_s: float, on_hang: Callable[[Hang], None], on_beat: Callable[[str], None] = lambda _text: None) -> None:
        """Starts it.

        Args:
            patience_s: for how long work may stand still.
            on_hang: called in this thread, once for each piece of work that hangs.
            on_beat: called in this thread at every look at work, with what it is.
        """
        self._patience_s = patience_s
        self._on_hang = on_hang
        self._on_beat = on_beat
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vigil", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * LOOK_S)

    def _run(self) -> None:
        seen, stillness, told, looked_s = None, Stillness(self._patience_s), False, time.monotonic()
        while not self._closed.wait(LOOK_S):
            now_s, work = time.monotonic(), current()
            if work is not seen:
                seen, stillness, told = work, Stillness(self._patience_s), False
            if work is not None:
                self._on_beat(work.text)
                too_long = stillness.look(work.signs(), now_s - looked_s)
                work.still_s = stillness.still_s
                if too_long and not told:
                    stack = phase.stack(work.thread)
                    if stillness.hangs(stack, waits=work.waits) and current() is work:
                        told = True
                        self._on_hang(Hang(work.text, stillness.still_s, stack))
            looked_s = now_s
