"""The engines of a run as one: the standing of each, and waits for enough of them. Requests go through `dispatch`.

An engine serves after a publish has proven it (`admit`). An engine that fails its probe or its proof is quarantined: it gets no more
requests, its answers are dropped, and other engines repeat its work. `health` brings it back (`restore`). While fewer than `min_engines`
are healthy, or none can serve a request, requests wait for one to heal, for `heal_timeout_s` at most.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, TypeVar

from offbeat.aio import HaltingClock, deadline
from offbeat.child_watch import BUSY_SHARE
from offbeat.errors import DeadlineError, EngineError, OffbeatError
from offbeat.fleet.listener import FleetListener
from offbeat.fleet.members import Guarded, Member, State
from offbeat.inference.client import EngineClient
from offbeat.types import Version
from offbeat.weights.protocol import EngineControl

T = TypeVar("T")

_PATIENCE = 3
"""Time for the second probe of an engine that computes, as a multiple of the first one's."""


class ProcessTimes(Protocol):
    """Computing times of the engines' processes, as far as they are seen from here."""

    def cpu_s(self, name: str) -> float | None:
        """Return the CPU time of an engine's processes so far, in seconds; None if that is not seen from here."""
        ...


class EnginePool:
    """Keeps the standing of each engine, and lets callers wait until enough engines serve.

    Attributes:
        members: all engines by name, in any state.
        min_engines: number of engines in service below which requests and publishes wait.
        clock: counts the time of waits for engines to heal; it stands still while they sleep.
        listener: hears what happens to the engines, also from all that works with the pool.
    """

    def __init__(
        self, clients: Iterable[EngineClient], *, probe_timeout_s: float = 5.0, min_engines: int = 1, heal_timeout_s: float = 0.0,
        listener: FleetListener | None = None, clock: HaltingClock | None = None, processes: ProcessTimes | None = None,
    ) -> None:
        """Begin with all engines unproven.

        Args:
            probe_timeout_s: time for an engine to answer that it is well.
            heal_timeout_s: longest wait of a request or a publish for engines; 0 where nobody heals them.
            clock: clock that also counts the time of the clients' requests; None for the pool's own.
            processes: tells whether an engine that is late computes; None where that is not known.
        """
        self.members: Mapping[str, Member] = {client.name: Member(client) for client in clients}
        self.min_engines = min_engines
        self.clock = clock or HaltingClock()
        self._probe_timeout_s = probe_timeout_s
        self._heal_timeout_s = heal_timeout_s
        self._processes = processes
        self.listener = FleetListener() if listener is None else listener
        self._changed = asyncio.Event()
        self._num_waiting = 0

    @property
    def states(self) -> Mapping[str, State]:
        """State of every engine, by name."""
        return {name: member.state for name, member in self.members.items()}

    @property
    def outstanding(self) -> Mapping[str, int]:
        """Outstanding tokens of each engine, by name; see `Member`."""
        return {name: member.outstanding_tokens for name, member in self.members.items()}

    @property
    def healthy(self) -> Mapping[str, EngineControl]:
        """Engines that serve or only lack a proof, by name; calls to them raise EngineError once they are quarantined."""
        return {name: Guarded(member) for name, member in self.members.items() if member.healthy}

    def client(self, name: str) -> EngineClient:
        """Return the client of an engine in any state."""
        return self.members[name].client

    def admit(self, name: str, version: Version) -> None:
        """Note that an engine in service proved this version of the weights; a proof does not end a quarantine."""
        member = self.members[name]
        if member.out:
            return
        if member.state is State.UNPROVEN:
            member.state = State.SERVING
        member.version = version
        if member.outstanding_tokens:
            self._end_busy(member)  # the timeline shows which version an engine generated with
        member.tell_version()
        self._tell()

    def quarantine(self, name: str, reason: str) -> None:
        """Take an engine out of service: it gets no more requests, and its answers are dropped. The first reason stands."""
        member = self.members[name]
        if member.out:
            return
        member.state, member.reason = State.QUARANTINED, reason
        member.stint.set()
        self.listener.quarantined(name, reason)
        self._tell()

    def mark_healing(self, name: str, *, url: str = "") -> None:
        """Note that a quarantined engine is being brought back, perhaps as another process at another URL."""
        member = self.members[name]
        assert member.out, f"{name} is {member.state.value} and needs no healing"
        member.state = State.HEALING
        if url:
            member.client.url = url.rstrip("/")

    def restore(self, name: str, version: Version | None) -> None:
        """End a quarantine, after the engine proved this version; None if no weights were published yet."""
        member = self.members[name]
        member.state = State.UNPROVEN if version is None else State.SERVING
        member.version, member.reason = version, ""
        member.tell_version()
        if member.stint.is_set():  # calls of the last stretch have ended; later ones belong to the next
            member.stint = asyncio.Event()
        self._tell()

    async def examine(self, name: str) -> None:
        """Probe an engine, and quarantine it if it does not answer in time or somebody has paused it.

        An engine that is late but computes, as on an overloaded machine, is asked once more, for three times as long.
        """
        member = self.members[name]
        before_s, timeout_s = self._cpu_s(name), self._probe_timeout_s
        try:
            try:
                told = await member.while_in_service(member.client.health(timeout_s=timeout_s))
            except DeadlineError:
                if self._cpu_s(name) - before_s < BUSY_SHARE * timeout_s:
                    raise
                self.listener.event("engine_slow", engine=name, seconds=timeout_s)
                told = await member.while_in_service(member.client.health(timeout_s=_PATIENCE * timeout_s))
        except OffbeatError as exc:
            self.quarantine(name, str(exc))
        else:
            if pause := told.get("paused"):
                self.quarantine(name, _paused(pause))

    def _cpu_s(self, name: str) -> float:
        return (self._processes.cpu_s(name) if self._processes else None) or 0.0

    async def wait_quarantined(self, name: str) -> None:
        """Return as soon as the engine is quarantined."""
        await self.members[name].stint.wait()

    async def wait_healthy(self, *, version: Version | None = None) -> Mapping[str, EngineControl]:
        """Wait for `min_engines` engines in service, and return all of them; with `version`, only engines that serve it or a newer one.

        Raises:
            EngineError: there are fewer after `heal_timeout_s`; gives each engine's reason.
        """
        def enough() -> Mapping[str, EngineControl]:
            found = {n: e for n, e in self.healthy.items() if version is None or self.members[n].serves(version)}
            return found if len(found) >= self.min_engines else {}

        return await self.wait(enough)

    async def wait(self, ready: Callable[[], T | None], *, last: EngineError | None = None) -> T:
        """Return the first true value that `ready` returns; it is called again whenever the standing of any engine changes.

        Raises:
            EngineError: there was none within `heal_timeout_s`; gives each engine's reason and `last`, the request's last error.
        """
        if found := ready():
            return found
        if self._heal_timeout_s and not self._num_waiting:
            self.listener.waits(f"waiting up to {self._heal_timeout_s:g} s for engines to heal: {self._reasons()}")
        self._num_waiting += 1
        try:
            async with deadline("engines", self._heal_timeout_s, clock=self.clock):
                while not (found := ready()):
                    await self._changed.wait()
            return found
        except DeadlineError as exc:
            raise EngineError(f"no engine can serve: {self._reasons()}{f'; last: {last}' if last else ''}") from exc
        finally:
            self._num_waiting -= 1

    def halt(self) -> None:
        """Note that the engines sleep: deadlines stand still, and nobody is busy."""
        self.clock.halt()
        for member in self.members.values():
            if member.outstanding_tokens:
                self._end_busy(member)

    def go_on(self) -> None:
        """Note that the engines sleep no more."""
        self.clock.go_on()
        for member in self.members.values():
            member.busy_since_s = time.time()

    @contextmanager
    def carrying(self, member: Member, cost: int) -> Iterator[None]:
        """Count the tokens of a request as outstanding on its engine while the body runs."""
        if not member.outstanding_tokens:
            member.busy_since_s = time.time()
        member.outstanding_tokens += cost
        try:
            yield
        finally:
            member.outstanding_tokens -= cost
            if not member.outstanding_tokens:
                self._end_busy(member)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _end_busy(self, member: Member) -> None:
        now_s = time.time()
        self.listener.busy(member.client.name, member.busy_since_s, now_s)
        member.busy_since_s = now_s

    def _reasons(self) -> str:
        return "; ".join(f"{name}: {m.reason or m.state.value}" for name, m in self.members.items())


def _paused(pause: object) -> str:
    """Return the reason to quarantine an engine that reports a pause which no publisher of this process has made."""
    told = pause if isinstance(pause, dict) else {}
    by = f" by {told['by']}" if told.get("by") else ""
    since = f", {told['for_s']:.0f} s ago" if isinstance(told.get("for_s"), int | float) else ""
    return f"it was paused{by}{since}, and not by this run"
