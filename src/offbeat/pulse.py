"""Signs of life of the thread that does a rank's work, by which its own process detects that it hangs.

    with work("train_step"):      # the current thread is watched until the end of the block
        progress("backward")      # it has reached a named place
        with waiting():           # from here on it waits for others, under a deadline of their own

A thread is alive while it reaches new places, computes, moves data or waits for a disk, whether it does so itself or through threads of a
library. A thread that does none of these and does not wait for another rank hangs: in a sleep, on a lock, or on an answer that does not
come. A rank held up by another rank also stands still, but inside a wait that is marked or visible in torch's frames.

    Vigil    consumes signs of life; produces beats, and one `Hang` for each piece of work that hangs; waits only for its clock
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
from typing import Protocol

from offbeat import phase

LOOK_S = 0.25
"""Seconds between two looks."""

MARGIN_S = 0.25
"""Seconds added to the patience, since reports of others at a sync point in the meantime are more informative and should come first."""

_OWN_SHARE, _HELPERS_SHARE = 0.01, 0.05
"""Minimum CPU share of one core for a thread that computes, and for the library threads beside it, some of which never rest entirely."""

_COLLECTIVE_CALLS = {("nn/parallel/distributed.py", "_pre_forward")}
"""Files of torch outside its distributed code, and functions, in which ranks wait for each other: DDP agrees on its buckets once, before a
forward pass."""

_TASKS = Path("/proc/self/task")


class ThreadWork:
    """One piece of work of one thread.

    Attributes:
        name: the name given, such as "train_step".
        at: the last place reached; "" before the first.
        still_s: seconds without a sign of life, as seen by the vigil.
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
        """The name and the place, such as "'train_step' (backward)"."""
        return repr(self.name) + (f" ({self.at})" if self.at else "")

    @property
    def waits(self) -> bool:
        """Whether the thread waits for other ranks, according to a mark or to torch's frames."""
        return self._waits > 0 or in_collective(sys._current_frames().get(self.thread))

    def signs(self) -> "Signs":
        """Return the signs of life visible now."""
        return Signs.read(self._steps, self._native, self._strangers)


_works: list[ThreadWork] = []
_strikes: list[Callable[[str], object]] = []


def current() -> ThreadWork | None:
    """Return the most recently begun work, of any thread, that has not ended."""
    try:
        return _works[-1]
    except IndexError:
        return None


def _own() -> ThreadWork | None:
    ident = threading.get_ident()
    return next((one for one in reversed(_works) if one.thread == ident), None)


@contextmanager
def work(name: str) -> Iterator[None]:
    """Declare that this thread works until the end of the block, so that it must show signs of life or be waiting."""
    own = ThreadWork(name)
    _works.append(own)
    try:
        yield
    finally:
        _works.remove(own)


def progress(at: str) -> None:
    """Report that this thread has reached a place in snake case, such as the next micro-batch or file; fault drills hook into it."""
    if own := _own():
        own._steps += 1
        own.at = at
    for strike in _strikes:
        strike(at)


@contextmanager
def waiting() -> Iterator[None]:
    """Mark that this thread waits for others until the end of the block, under a deadline that the block sets itself."""
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
    """Call `strike` at every place, in the thread that reaches it. Used by fault drills."""
    _strikes.append(strike)


def in_collective(frame: FrameType | None) -> bool:
    """Whether the thread with this innermost frame has called torch for a collective, or for a backward pass, which ends in one.

    Torch's checkpoint writer is part of its distributed code, but it writes files and does not count.
    """
    while frame is not None and "/torch/" in (file := frame.f_code.co_filename):
        if "/torch/distributed/" in file and "/torch/distributed/checkpoint/" not in file:
            return True
        if (file.rpartition("/torch/")[2], frame.f_code.co_name) in _COLLECTIVE_CALLS or frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class Signs:
    """Signs of life at one look at a working thread; counters start at arbitrary values.

    Attributes:
        steps: number of places reached.
        cpu_s: CPU time of the thread itself.
        helpers_s: CPU time of threads started by libraries, and of Python threads started since the work began.
        moved: bytes read and written by the thread, plus pages read in for it.
        on_disk: whether the thread is waiting for a disk at this moment.
    """

    steps: int
    cpu_s: float
    helpers_s: float = 0.0
    moved: int = 0
    on_disk: bool = False

    @classmethod
    def read(cls, steps: int, native: int, strangers: set[int | None]) -> "Signs":
        """Read the signs of the thread with the native ID `native`, without those of the threads in `strangers`.

        Where the system does not report this much, any CPU time of this process is a sign.
        """
        try:
            helpers = [int(task.name) for task in _TASKS.iterdir()]
        except OSError:
            return cls(steps, time.process_time())
        cpu_s = _cpu_s(native)
        helpers_s = sum(_cpu_s(task) for task in helpers if task != native and task not in strangers and task != threading.get_native_id())
        fields = _read_proc(native, "stat").rpartition(")")[2].split()
        counts = dict(line.split(": ") for line in _read_proc(native, "io").splitlines() if ": " in line)
        moved = sum(int(counts.get(name, 0)) for name in ("rchar", "wchar", "read_bytes")) + (int(fields[9]) if fields else 0)
        return cls(steps, cpu_s, helpers_s, moved, on_disk=bool(fields) and fields[0] == "D")

    def since(self, before: "Signs", seconds: float) -> bool:
        """Whether there was a sign of life in the `seconds` since an earlier look."""
        return (
            self.on_disk or self.steps != before.steps or self.moved != before.moved
            or self.cpu_s - before.cpu_s >= _OWN_SHARE * seconds or self.helpers_s - before.helpers_s >= _HELPERS_SHARE * seconds)


def _cpu_s(task: int) -> float:
    if text := _read_proc(task, "schedstat"):
        return int(text.split()[0]) / 1e9
    fields = _read_proc(task, "stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _read_proc(task: int, name: str) -> str:
    try:
        return (_TASKS / str(task) / name).read_text()
    except OSError:  # the thread has ended, or the system does not report this
        return ""


@dataclass(frozen=True)
class Hang:
    """A thread that hangs, `still_s` seconds without a sign of life; `stack` has one line per call, innermost last."""

    where: str
    still_s: float
    stack: tuple[str, ...]

    def text(self, name: str) -> str:
        """Return a sentence about the process called `name`, followed by the stack."""
        head = f"{name} hangs in {self.where}: for {self.still_s:.1f} s it has computed nothing, moved no data and waited for no other rank"
        if not self.stack:
            return head
        return f"{head}, and stands at {self.stack[-1]}\n  {name}, innermost call last:" + "".join(f"\n    {line}" for line in self.stack)


class Stillness:
    """Measures how long a piece of work has stood still, from look to look, and decides whether it hangs. Pure."""

    def __init__(self, patience_s: float) -> None:
        self.still_s = 0.0
        self._patience_s = patience_s
        self._before: Signs | None = None
        self._stack: tuple[str, ...] | None = None

    def look(self, signs: Signs, seconds: float) -> bool:
        """Take in a look made `seconds` after the previous one. Returns whether the work has stood still for at least the patience.

        The clock also runs while the process is stopped, so a look counts for at most two intervals.
        """
        seconds = min(seconds, 2 * LOOK_S)
        still = self._before is not None and not signs.since(self._before, seconds)
        self._before = signs
        self.still_s = self.still_s + seconds if still else 0.0
        if self.still_s < self._patience_s:
            self._stack = None
        return self.still_s >= self._patience_s

    def hangs(self, stack: tuple[str, ...], *, waits: bool) -> bool:
        """Whether work that has stood still this long hangs, given its current stack: two such stacks in a row must be equal."""
        same, self._stack = stack == self._stack, None if waits else stack
        return same and not waits and self.still_s >= self._patience_s + MARGIN_S


class VigilListener(Protocol):
    """Hears of a process's work, in the thread of its `Vigil`."""

    def beat(self, text: str) -> None:
        """The process does this work, such as "'save' (write_checkpoint)"; called at every look."""
        ...

    def hangs(self, hang: Hang) -> None:
        """A piece of work hangs; called once for each."""
        ...


class Vigil:
    """A thread that reports the beats of its process's work and detects when the work hangs."""

    def __init__(self, listener: VigilListener, *, patience_s: float) -> None:
        """Start the thread; work may stand still for `patience_s` seconds."""
        self._listener = listener
        self._patience_s = patience_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vigil", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
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
                self._listener.beat(work.text)
                too_long = stillness.look(work.signs(), now_s - looked_s)
                work.still_s = stillness.still_s
                if too_long and not told:
                    stack = phase.stack(work.thread)
                    if stillness.hangs(stack, waits=work.waits) and current() is work:
                        told = True
                        self._listener.hangs(Hang(work.text, stillness.still_s, stack))
            looked_s = now_s
