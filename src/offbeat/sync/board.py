"""State shared by the threads of one rank: the point that it waits at, the failure that ended the group, and its last beat.

Fields are single references, written by one thread and read by others, so they need no lock. Only the first message of a wait counts.
"""

import logging
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Protocol

from offbeat import phase, pulse
from offbeat.errors import StuckError
from offbeat.sync.verdict import RankStatus, SyncVerdict

_log = logging.getLogger(__name__)

PASSED = None
"""Message to a waiting caller: all ranks are there."""


@dataclass(frozen=True)
class Renewed:
    """Message to a waiting caller: the rank that it waits for patiently is alive, so the deadline starts again."""


Message = SyncVerdict | Renewed | None


@dataclass(frozen=True, eq=False)
class Announcement:
    """Message to the judge: this rank cannot go on, and the peers must be told this verdict."""

    verdict: SyncVerdict
    done: threading.Event = field(default_factory=threading.Event)


def breakage(rank: int, exc: Exception) -> Announcement:
    """Announce an unexpected exception in a thread of this process, which is rank `rank`; it makes its peers' points meaningless, too."""
    _log.error("a thread of sync broke", exc_info=exc)
    return Announcement(SyncVerdict("failed", f"rank {rank} failed: its sync broke: {type(exc).__name__}: {exc}"))


@dataclass(eq=False)
class Wait:
    """One arrival of this rank at a sync point.

    Attributes:
        n: number of the point, counted alike on every rank, from 1.
        keys: keys of the values that are exchanged behind the point; they must agree between ranks, as the name must.
        patient_with: other ranks whose beats extend this wait.
        heard: whether the store has answered the judge that looks at this wait.
        abandoned: why the caller left without a verdict; if this rank owns the verdict, it hands out this one.
    """

    n: int
    name: str
    timeout_s: float
    patient_with: frozenset[int]
    thread: int
    keys: tuple[str, ...] = ()
    since_s: float = field(default_factory=time.monotonic)
    messages: "queue.SimpleQueue[Message]" = field(default_factory=queue.SimpleQueue)
    heard: bool = False
    abandoned: SyncVerdict | None = None

    @property
    def signature(self) -> str:
        """Name and keys of the point, joined by NUL, which must be the same on all ranks; e.g. "step_times" without keys."""
        return "\0".join((self.name, *self.keys))


class RankListener(Protocol):
    """Hears of one rank, in other threads than the one that computes."""

    def give_up(self, error: StuckError) -> None:
        """This rank or a peer is stuck; the thread that computes may never be told."""
        ...

    def beat(self, text: str) -> None:
        """The rank does some `offbeat.pulse.work`, such as "'save' (write_checkpoint)"; called four times a second."""
        ...


class Judging(Protocol):
    """What finds out why a point cannot be passed."""

    def post(self, case: "Wait | Announcement") -> None:
        """Hand in a case; never blocks."""
        ...


class BoardListener(Protocol):
    """Hears of failures that the caller of a rank may never see, since it may be in a collective that does not end."""

    def hear_of_stuck(self, verdict: SyncVerdict) -> None:
        """This rank or a peer is stuck."""
        ...


class Board:
    """State of one rank.

    Attributes:
        wait: the arrival that the caller waits for; None when it is elsewhere.
        last, last_s: name of the point that the caller left last, and time.monotonic() at that moment.
        inside: number of the point whose collective the caller is in; 0 outside.
        failure: why no point will ever be passed again; None while all is well.
        beat_s: time.monotonic() of the last beat.
    """

    def __init__(self, rank: int, listener: BoardListener | None = None) -> None:
        self._listener = listener
        self.rank = rank
        self.wait: Wait | None = None
        self.arrivals = 0
        self.last = "start"
        self.last_s = time.monotonic()
        self.inside = 0
        self.failure: SyncVerdict | None = None
        self.beat_s = time.monotonic()

    def status(self) -> RankStatus:
        """Describe what this rank does; without `states`, which the watcher adds."""
        now, mark, wait, work = time.monotonic(), phase.current(), self.wait, pulse.current()
        thread = wait.thread if wait else work.thread if work else mark.thread
        return RankStatus(
            rank=self.rank, phase=mark.text, phase_s=now - mark.since_s, point=wait.name if wait else "", keys=wait.keys if wait else (),
            n=wait.n if wait else 0, waited_s=now - wait.since_s if wait else 0.0, last=self.last, last_s=now - self.last_s,
            inside=self.inside, stack=phase.stack(thread), beat_age_s=now - self.beat_s, states=(), still_s=work.still_s if work else 0.0,
            waits=work.waits if work else wait is not None)

    def leave_point(self, name: str) -> None:
        """Record that the caller goes on, with or without an error."""
        self.wait, self.last, self.last_s = None, name, time.monotonic()

    def fail(self, verdict: SyncVerdict) -> Wait | None:
        """Record that no point will be passed again; the first failure stays. Returns the wait that was told, whose result is open."""
        is_first, self.failure = self.failure is None, self.failure or verdict
        if is_first and verdict.kind == "stuck" and self._listener is not None:
            self._listener.hear_of_stuck(verdict)
        if wait := self.wait:
            wait.messages.put(self.failure)
        return wait
