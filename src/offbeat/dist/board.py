"""What the threads of one rank tell each other: the point it waits at, the failure that ended it all, its beat.

Fields are single references, written by one thread and read by others, so they need no lock. A wait's first message counts.
"""

import queue
import time
from dataclasses import dataclass, field

from offbeat import phase
from offbeat.dist.verdict import Status, Verdict

PASSED = None
"""Message to a waiting caller: all are there."""


@dataclass(frozen=True)
class Renewed:
    """Message to a waiting caller: the rank it is patient with is alive; its deadline starts anew."""


Message = Verdict | Renewed | None


@dataclass(eq=False)
class Wait:
    """One arrival of this rank.

    Attributes:
        n: number of the point, counted alike on every rank, from 1.
        source: rank whose beat this wait is patient with; None for none.
        messages: to the caller.
        abandoned: what the caller raised when no verdict reached it; the rank that owns the verdict then hands out this one.
    """

    n: int
    name: str
    timeout_s: float
    source: int | None
    thread: int
    since_s: float = field(default_factory=time.monotonic)
    messages: "queue.SimpleQueue[Message]" = field(default_factory=queue.SimpleQueue)
    abandoned: Verdict | None = None


class Board:
    """State of one rank.

    Attributes:
        wait: the arrival that the caller waits for; None when it is elsewhere.
        arrivals: how many there were.
        last, last_s: name of the point that it came from last, and time.monotonic() when it did.
        inside: number of the point whose collective it is in; 0 outside.
        failure: why no point will ever be passed again; None while all is well.
        beat_s: time.monotonic() of the last beat.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.wait: Wait | None = None
        self.arrivals = 0
        self.last = "start"
        self.last_s = time.monotonic()
        self.inside = 0
        self.failure: Verdict | None = None
        self.beat_s = time.monotonic()

    def status(self) -> Status:
        """What this rank does; without `states`, which the watcher adds."""
        now, mark, wait = time.monotonic(), phase.current(), self.wait
        return Status(
            rank=self.rank, phase=mark.text, phase_s=now - mark.since_s, point=wait.name if wait else "", n=wait.n if wait else 0,
            waited_s=now - wait.since_s if wait else 0.0, last=self.last, last_s=now - self.last_s, inside=self.inside,
            stack=phase.stack(wait.thread if wait else mark.thread), beat_age_s=now - self.beat_s, states=())

    def leave_point(self, name: str) -> None:
        """The caller goes on, with an error or without."""
        self.wait, self.last, self.last_s = None, name, time.monotonic()

    def fail(self, verdict: Verdict) -> None:
        """No point will be passed again; whoever waits is told. The first failure stays."""
        self.failure = self.failure or verdict
        if self.wait:
            self.wait.messages.put(self.failure)
