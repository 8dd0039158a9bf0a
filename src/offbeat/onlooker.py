"""What a parent sees of a child from outside, and when it gives up on a call: the child is stopped, or answers and computes nothing.

A child that hangs in Python says so itself (`offbeat.pulse`); one that cannot run its interpreter is seen here. Used by `offbeat.process`.
"""

import time
from pathlib import Path

import psutil

from offbeat.errors import StuckError

LOOK_S = 0.25
"""Between two looks at a child that is called."""

_MARGIN_S = 0.25
"""On top of the patience: what ranks find out about each other at a point says more."""

_LOG_TAIL_LINES = 12

_BUSY_SHARE = 0.01
"""Of a core: what a process that computes uses at the least."""


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process, so that only SIGKILL reaches it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def system_view(pid: int) -> str:
    """What the operating system knows of a process, in a few words."""
    try:
        with (process := psutil.Process(pid)).oneshot():
            status, times, memory = process.status(), process.cpu_times(), process.memory_info()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return "it is dead"
    if status == psutil.STATUS_STOPPED:
        return "it is stopped by a signal (SIGSTOP)"
    return f"it is {status}, after {times.user + times.system:.1f} s of CPU time, with {memory.rss / 1e6:.0f} MB of memory"


def log_tail(log: Path | None) -> str:
    """The last lines of a log, or an empty string."""
    if log is None or not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])


class Onlooker:
    """Counts for how long a child has been stopped, or has been silent in a call without computing. Pure but for `look`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._call = self._work = ""
        self._stopped_s = self._silent_s = 0.0
        self._cpu_s = 0.0
        self._looked_s = time.monotonic()

    def begin(self, method: str) -> None:
        """A call begins, which the child does not yet speak of."""
        self._call = self._work = repr(method)
        self._silent_s = 0.0

    def look(self, pid: int, *, beat: tuple[float, str] | None) -> None:
        """Look at the process now; `beat` is when it was heard last, by time.monotonic(), and what it said it did, if ever."""
        now_s = time.monotonic()
        try:
            with (process := psutil.Process(pid)).oneshot():
                status, times = process.status(), process.cpu_times()
        except psutil.NoSuchProcess:  # its end is told elsewhere
            return
        stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        heard = beat is not None and beat[0] >= self._looked_s
        silent = not (beat is None or heard or status == psutil.STATUS_DISK_SLEEP)
        self.see(
            stopped=stopped, silent=silent, cpu_s=times.user + times.system, seconds=now_s - self._looked_s,
            work=beat[1] if beat and heard else "")
        self._looked_s = now_s

    def see(self, *, stopped: bool, silent: bool, cpu_s: float, seconds: float, work: str = "") -> None:
        """Take in a look, `seconds` after the one before, and the `work` that was heard of meanwhile.

        A clock runs on while this process is stopped itself, so no look counts for more than two.
        """
        self._work = work if work.startswith(self._call) else self._work  # a word may still be of the call before
        seconds = min(seconds, 2 * LOOK_S)
        busy = cpu_s - self._cpu_s >= _BUSY_SHARE * seconds
        self._cpu_s = cpu_s
        self._stopped_s = self._stopped_s + seconds if stopped else 0.0
        self._silent_s = self._silent_s + seconds if silent and not busy and not stopped else 0.0

    def verdict(self, *, patience_s: float) -> StuckError | None:
        """Why the present call is not waited for any longer."""
        limit_s = patience_s + _MARGIN_S
        if self._stopped_s >= limit_s:
            return StuckError(f"{self._name} is stopped by a signal (SIGSTOP or a debugger), for {self._stopped_s:.1f} s in {self._work}")
        if self._silent_s >= limit_s:
            return StuckError(
                f"{self._name} hangs in {self._work}: for {self._silent_s:.1f} s it has computed nothing, and native code holds its"
                " interpreter, so that it can show no stack")
        return None
