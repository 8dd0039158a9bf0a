"""Runs a command and measures all processes below it: wall time, CPU time and memory, also between two moments of the run."""

import os
import subprocess
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

LOOK_S = 0.25
_GROWTH = 1.02
"""Growth of the resident bytes, in which shared pages count for each process, after which memory is measured exactly: that reads the tables
of all pages, which took a quarter of a core for 9 GB when it was done each time."""


@dataclass(frozen=True)
class TreeRun:
    """A command that has ended well.

    Attributes:
        began_s: wall-clock time at which it was started.
        cpu_curve: (wall-clock time, CPU seconds of all processes until then), in order.
        peak_bytes: most memory of all processes at a time; a page that several share counts once.
    """

    stdout: str
    began_s: float
    wall_s: float
    cpu_curve: tuple[tuple[float, float], ...]
    peak_bytes: float

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the whole run."""
        return self.cpu_curve[-1][1]

    def cpu_between(self, begin_s: float, end_s: float) -> float:
        """Return the CPU seconds between two moments of wall-clock time."""
        return self._cpu_at(end_s) - self._cpu_at(begin_s)

    def _cpu_at(self, time_s: float) -> float:
        times = [moment for moment, _ in self.cpu_curve]
        after = min(max(bisect_left(times, time_s), 1), len(times) - 1)
        (t0, c0), (t1, c1) = self.cpu_curve[after - 1], self.cpu_curve[after]
        share = min(max((time_s - t0) / (t1 - t0), 0.0), 1.0) if t1 > t0 else 1.0
        return c0 + share * (c1 - c0)


def run_tree(command: Sequence[object], *, log: Path, env: Mapping[str, str]) -> TreeRun:
    """Run a command to its end, with stderr in a log.

    Raises:
        RuntimeError: it failed; names its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    began_s = time.time()
    with log.open("w") as stderr, subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | dict(env)) as process:
        look = _Look(process.pid)
        thread = threading.Thread(target=look.go_on, daemon=True)
        thread.start()
        stdout, _ = process.communicate()
        look.ended.set()
        thread.join()
    if process.returncode:
        raise RuntimeError(f"{Path(str(command[0])).name} failed with exit code {process.returncode}; see {log}")
    return TreeRun(stdout, began_s, time.time() - began_s, ((began_s, 0.0), *look.curve), look.peak_bytes)


def tree_of(root: psutil.Process) -> list[psutil.Process]:
    """Return a process and all that live below it; raises psutil.NoSuchProcess if it has ended."""
    return [root, *root.children(recursive=True)]


def cpu_s_of(process: psutil.Process) -> float:
    """Return the CPU seconds of a process so far, without its children's; raises psutil.NoSuchProcess if it has ended."""
    times = process.cpu_times()
    return times.user + times.system


class _Look:
    """Looks at a tree of processes until `ended` is set."""

    def __init__(self, pid: int) -> None:
        self.ended = threading.Event()
        self.curve: list[tuple[float, float]] = []
        self.peak_bytes = 0.0
        self._root = psutil.Process(pid)
        self._cpu_s: dict[int, float] = {}  # of processes that have ended, too
        self._resident_bytes = 0.0  # when memory was measured last

    def go_on(self) -> None:
        while not self.ended.wait(LOOK_S):
            now_s, resident, processes = time.time(), 0, []
            with suppress(psutil.NoSuchProcess):
                processes = tree_of(self._root)
            for process in processes:
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    self._cpu_s[process.pid] = cpu_s_of(process)
                    resident += process.memory_info().rss
            if resident > self._resident_bytes * _GROWTH:
                self._resident_bytes = resident
                self.peak_bytes = max(self.peak_bytes, sum(map(_proportional_bytes, processes)))
            self.curve.append((now_s, sum(self._cpu_s.values())))


def _proportional_bytes(process: psutil.Process) -> float:
    """Return the bytes of a process, of pages that are shared its part; 0 if it has ended."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return process.memory_full_info().pss
    return 0.0
