"""What the threads of one rank tell each other: the point it waits at, the failure that ended it all, its beat.

Fields are single references, written by one thread and read by others, so they need no lock. A wait's first message counts.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from offbeat import phase, pulse
from offbeat.dist.verdict import Status, Verdict

_log = logging.getLogger(__name__)

PASSED = None
"""Message to a waiting caller: all are there."""


@dataclass(frozen=True)
class Renewed:
    """Message to a waiting caller: the rank it is patient with is alive; its deadline starts anew."""


Message = Verdict | Renewed | None


@dataclass(frozen=True, eq=False)
class Announcement:
    """Message to the judge: this rank has failed, or hangs as a whole sentence says, and the peers must hear of it."""

    text: str
    hangs: bool = False
    done: threading.Event = field(default_factory=threading.Event)


def breakage(exc: Exception) -> Announcement:
    """That a thread of this rank met an exception that it did not expect, which makes its peers' points meaningless too."""
    _log.error("a thread of sync broke", exc_info=exc)
    return Announcement(f"its sync broke: {type(exc).__name__}: {exc}")


@dataclass(eq=False)
class Wait:
    """One arrival of this rank.

    Attributes:
        n: number of the point, counted alike on every rank, from 1.
        keys: those of the values that are exchanged behind the point, which must agree as the name does.
        source: rank whose beat this wait is patient with; None for none.
        messages: to the caller.
        heard: the store has answered the judge that looks at this wait.
        abandoned: why the caller goes without a verdict; the rank that owns the verdict then hands out this one.
    """

    n: int
    name: str
    timeout_s: float
    source: int | None
    thread: int
    keys: tuple[str, ...] = ()
    since_s: float = field(default_factory=time.monotonic)
    messages: "queue.SimpleQueue[Message]" = field(default_factory=queue.SimpleQueue)
    heard: bool = False
    abandoned: Verdict | None = None

    @property
    def signature(self) -> str:
        """What all ranks must come with."""
        return "\0".join((self.name, *self.keys))


class Board:
    """State of one rank.

    Attributes:
        wait: the arrival that the caller waits for; None when it is elsewhere.
        arrivals: how many there were.
        last, last_s: name of the point that it came from last, and time.monotonic() when it did.
        inside: number of the point whose collective it is in; 0 outside.
        inside_s: time.monotonic() when it entered that.
        failure: why no point will ever be passed again; None while all is well.
        beat_s: time.monotonic() of the last beat.
    """

    def __init__(self, rank: int, *, on_stuck: Callable[[Verdict], None] = lambda _verdict: None) -> None:
        """`on_stuck` hears of a failure that this rank's thread may not hear of, for it may be in a collective that does not end."""
        self._on_stuck = on_stuck
        self.rank = rank
        self.wait: Wait | None = None
        self.arrivals = 0
        self.last = "start"
        self.last_s = time.monotonic()
        self.inside = 0
        self.inside_s = time.monotonic()
        self.failure: Verdict | None = None
        self.beat_s = time.monotonic()

    def status(self) -> Status:
        """What this rank does; without `states`, which the watcher adds."""
        now, mark, wait, work = time.monotonic(), phase.current(), self.wait, pulse.current()
        thread = wait.thread if wait else work.thread if work else mark.thread
        return Status(
            rank=self.rank, phase=mark.text, phase_s=now - mark.since_s, point=wait.name if wait else "",
            keys=wait.keys if wait else (), n=wait.n if wait else 0,
            waited_s=now - wait.since_s if wait else 0.0, last=self.last, last_s=now - self.last_s, inside=self.inside,
            stack=phase.stack(thread), beat_age_s=now - self.beat_s, states=(), still_s=work.still_s if work else 0.0,
            waits=work.waits if work else wait is not None)

    def leave_point(self, name: str) -> None:
        """The caller goes on, with an error or without."""
        self.wait, self.last, self.last_s = None, name, time.monotonic()

    def fail(self, verdict: Verdict) -> Wait | None:
        """No point will be passed again. The first failure stays. Returns the wait that was told so, whose result is still open."""
        is_first, self.failure = self.failure is None, self.failure or verdict
        if is_first and verdict.kind == "stuck":
            self._on_stuck(verdict)
        if wait := self.wait:
            wait.messages.put(self.failure)
        return wait
