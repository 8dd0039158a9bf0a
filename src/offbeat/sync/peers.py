"""States and deaths of the other ranks' processes, as the operating system reports them. Used by the judge of a sync point.

Only processes of the same machine and process-id namespace are visible. Linux reports how a process ended until its parent has reaped it;
elsewhere, and afterwards, a dead process is just gone.
"""

import contextlib
import errno
import os
import select
import signal
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

_FALLBACK_POLL_S = 0.25
"""Interval between two looks at processes without a file descriptor to wait on."""

_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk", "I": "idle"}


@dataclass(frozen=True)
class Card:
    """Identity of a rank's process.

    Attributes:
        started: clock ticks from boot to its start, unique among processes with the same id; 0 where the system does not say.
        machine: equal for processes that can see each other.
        hosts_store: whether its process serves the store.
    """

    rank: int
    host: str
    pid: int
    started: int
    machine: str
    hosts_store: bool

    @property
    def is_near(self) -> bool:
        """Whether this process can see it."""
        return self.machine == _machine()


@dataclass(frozen=True)
class ProcessState:
    """State of a rank's process; `text` continues "rank 1 ", for example "was killed by SIGKILL"."""

    rank: int
    kind: Literal["alive", "stopped", "dead"]
    text: str


@cache
def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname()


def own_card(rank: int, *, hosts_store: bool) -> Card:
    """Return the card of this process."""
    stat = _stat(os.getpid())
    return Card(rank=rank, host=socket.gethostname(), pid=os.getpid(), started=int(stat[19]) if stat else 0, machine=_machine(),
                hosts_store=hosts_store)


def observe(card: Card) -> ProcessState:
    """Look at a process of this machine."""
    stat = _stat(card.pid)
    if not stat:
        alive = card.started == 0 and _answers_signals(card.pid)
        return ProcessState(card.rank, "alive", "is alive") if alive else ProcessState(card.rank, "dead", "is gone")
    if int(stat[19]) != card.started:
        return ProcessState(card.rank, "dead", "is gone")
    state, cpu_s = stat[0], (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    if state in "ZX":
        return ProcessState(card.rank, "dead", _ending(int(stat[49])))
    if state in "Tt":
        return ProcessState(card.rank, "stopped", "is stopped by a signal (SIGSTOP or a debugger)")
    return ProcessState(card.rank, "alive", f"is {_STATES.get(state, state)}, after {cpu_s:.1f} s of CPU time")


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third (the state) on, as the second may hold spaces; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _answers_signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as exc:
        return exc.errno == errno.EPERM
    return True


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals between the first and the last have no name
        return f"signal {number}"


def end_if_stopped(card: Card) -> None:
    """Kill a process of this machine that a signal has stopped, but not one that a debugger holds, since somebody is looking at it."""
    stat = _stat(card.pid)
    if stat and stat[0] == "T" and int(stat[19]) == card.started:
        with contextlib.suppress(OSError):
            os.kill(card.pid, signal.SIGKILL)


class Deaths:
    """Waits for processes of this machine to end; one thread waits, any thread may wake it."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        self._unwaitable: list[Card] = []
        self._woken, self._wake = os.pipe()
        self._lock = threading.Lock()
        self._closed = False
        self._poll.register(self._woken, select.POLLIN)

    def add(self, cards: Iterable[Card]) -> None:
        """Watch these processes, too; called by the waiting thread."""
        for card in cards:
            try:
                descriptor = os.pidfd_open(card.pid)
            except (AttributeError, OSError):  # there is no such call here, or the process is gone already
                self._unwaitable.append(card)
            else:
                self._ranks[descriptor] = card.rank
                self._poll.register(descriptor, select.POLLIN)

    def wait(self, timeout_s: float | None = None) -> list[int]:
        """Return the ranks that have died since the last call; returns empty-handed when woken, or after `timeout_s` seconds."""
        died = self._take_unwaitable()
        while not died:
            ready = self._poll.poll(_FALLBACK_POLL_S * 1000 if self._unwaitable else timeout_s and timeout_s * 1000)
            died = [self._ranks.pop(descriptor) for descriptor, _ in ready if descriptor in self._ranks]
            for descriptor, _ in ready:
                if descriptor == self._woken:
                    os.read(self._woken, 4096)
                    return [*died, *self._take_unwaitable()]
                self._poll.unregister(descriptor)
                os.close(descriptor)
            died += self._take_unwaitable()
            if timeout_s and not ready:
                break
        return died

    def _take_unwaitable(self) -> list[int]:
        dead = [card for card in self._unwaitable if observe(card).kind == "dead"]
        for card in dead:
            self._unwaitable.remove(card)
        return [card.rank for card in dead]

    def wake(self) -> None:
        """Make `wait` return; does nothing once closed, when no thread waits."""
        with self._lock:  # once closed, the descriptor's number may belong to another file
            if not self._closed:
                os.write(self._wake, b"\0")

    def close(self) -> None:
        """Release the descriptors; called by the waiting thread when it no longer waits."""
        with self._lock:
            self._closed = True
            for descriptor in (*self._ranks, self._woken, self._wake):
                os.close(descriptor)
