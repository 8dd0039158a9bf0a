"""Watches a child process from outside, and decides when the parent gives up on a call because the child is stopped or makes no progress.

A child that hangs in Python reports that itself (`offbeat.pulse`). One whose interpreter cannot run is detected here, for `process`.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from offbeat.errors import StuckError

LOOK_S = 0.25
"""Seconds between two looks at a child during a call."""

_MARGIN_S = 0.25
"""Seconds added to the patience, since reports of ranks about each other at a sync point are more informative and should come first."""

_LOG_TAIL_LINES = 12

MOST_LOG_BYTES = 64 << 20
"""Size of a child's log beyond which its beginning is dropped."""
_KEPT_BYTES = 1 << 20
"""Bytes at the end of such a log that are kept."""

BUSY_SHARE = 0.01
"""CPU share of one core from which a process counts as computing."""


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process, in which case only SIGKILL (or SIGCONT) reaches it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of its living descendants, in seconds; 0 if it is dead."""
    total_s = 0.0
    with suppress(psutil.NoSuchProcess):
        for process in ((root := psutil.Process(pid)), *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total_s += times.user + times.system
    return total_s


def system_view(pid: int) -> str:
    """Describe a process in a few words from the operating system's facts."""
    try:
        with (process := psutil.Process(pid)).oneshot():
            status, times, memory = process.status(), process.cpu_times(), process.memory_info()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return "it is dead"
    if status == psutil.STATUS_STOPPED:
        return "it is stopped by a signal (SIGSTOP)"
    return f"it is {status}, after {times.user + times.system:.1f} s of CPU time, with {memory.rss / 1e6:.0f} MB of memory"


def log_tail(log: Path | None) -> str:
    """Return the last lines of a log, or an empty string if there is no log."""
    if log is None or not log.exists():
        return ""
    return "\n".join(_end_of(log).decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:])


def bound_log(log: Path, *, most_bytes: int = MOST_LOG_BYTES) -> None:
    """Drop the beginning of a log that has grown beyond a size, so that output of user code never fills the disk.

    Lines that processes append meanwhile come behind the kept part, or are lost.
    """
    with suppress(OSError):
        if (size := log.stat().st_size) > most_bytes:
            kept = _end_of(log)
            os.truncate(log, 0)
            with log.open("ab") as file:
                file.write(f"({size - len(kept)} bytes that were printed before were dropped)\n".encode() + kept)


def _end_of(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _KEPT_BYTES))
        return file.read()


class ChildWatch:
    """Measures how long a child has been stopped, or silent in a call without computing. Pure apart from `look`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._call = self._work = ""
        self._stopped_s = self._silent_s = 0.0
        self._cpu_s = 0.0
        self._looked_s = time.monotonic()

    def begin_call(self, method: str) -> None:
        """Note that a call begins; the child has not reported on it yet."""
        self._call = self._work = repr(method)
        self._silent_s = 0.0

    def look(self, pid: int, *, beat: tuple[float, str] | None) -> None:
        """Look at the process now.

        `beat` is time.monotonic() and work of the child's last report, such as (1234.5, "'train_step' (backward)"); None without one.
        """
        now_s = time.monotonic()
        try:
            with (process := psutil.Process(pid)).oneshot():
                status, times = process.status(), process.cpu_times()
        except psutil.NoSuchProcess:  # the process's end is reported elsewhere
            return
        stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        heard = beat is not None and beat[0] >= self._looked_s
        silent = not (beat is None or heard or status == psutil.STATUS_DISK_SLEEP)
        self.see(
            stopped=stopped, silent=silent, cpu_s=times.user + times.system, seconds=now_s - self._looked_s,
            work=beat[1] if beat and heard else "")
        self._looked_s = now_s

    def see(self, *, stopped: bool, silent: bool, cpu_s: float, seconds: float, work: str = "") -> None:
        """Take in an observation made `seconds` after the previous one, with the `work` reported in between.

        The clock also runs while this process itself is stopped, so an observation counts for at most two intervals.
        """
        self._work = work if work.startswith(self._call) else self._work  # a report may still belong to the previous call
        seconds = min(seconds, 2 * LOOK_S)
        busy = cpu_s - self._cpu_s >= BUSY_SHARE * seconds
        self._cpu_s = cpu_s
        self._stopped_s = self._stopped_s + seconds if stopped else 0.0
        self._silent_s = self._silent_s + seconds if silent and not busy and not stopped else 0.0

    def verdict(self, *, patience_s: float) -> StuckError | None:
        """Return the reason to stop waiting for the current call, or None to keep waiting."""
        limit_s = patience_s + _MARGIN_S
        if self._stopped_s >= limit_s:
            return StuckError(f"{self._name} is stopped by a signal (SIGSTOP or a debugger), for {self._stopped_s:.1f} s in {self._work}")
        if self._silent_s >= limit_s:
            return StuckError(
                f"{self._name} hangs in {self._work}: for {self._silent_s:.1f} s it has computed nothing, and native code holds its"
                " interpreter, so that it can show no stack")
        return None
