"""Processes that run the code of users: agents, tools and environments. Each plays many episodes at the same time.

Episodes that await do not disturb each other. A process whose event loop stands still, or that dies, is replaced; its episodes end with
`LostError`, and may be played again from the beginning. If an episode ends while a thread of its still runs, the process takes no further
episodes, and is ended as soon as the others are through.

    PlayPool.seat      consumes free places; produces episodes in processes; waits for a place; woken by episodes that end
    _Process.watch     consumes answers to pings; produces the end of a process that gives none; waits for the deadline of each
"""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from offbeat.agents.places import Places
from offbeat.agents.worker import CloseRequest, PlayLoaded, PlayLoadRequest
from offbeat.aio import gather_all
from offbeat.chat.messages import Tool
from offbeat.data import wire
from offbeat.errors import CodeError, DeadlineError, DeathError, WorkerError
from offbeat.hosts import LOOPBACK, direct
from offbeat.process.child import Child, ChildSpec
from offbeat.rollout.episode import Waiting, on_the_clock
from offbeat.rollout.reward_pool import secret_variables

T = TypeVar("T")

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 5.0


class LostError(CodeError):
    """The process that played this episode ended, perhaps because of another one; the episode may be played again."""


class _Process:
    """One process, and the number of episodes that it plays."""

    def __init__(self, child: Child, *, blocked_timeout_s: float, tell: Callable[[str], None]) -> None:
        self.child = child
        self.num_taken = 0
        self.retired = False
        self.lost = ""
        self._blocked_timeout_s = blocked_timeout_s
        self._tell = tell
        self._watching = asyncio.create_task(self._watch(), name=f"watch {child.name}")

    async def _watch(self) -> None:
        while self.child.alive:
            try:
                await self.child.call("ping", timeout_s=self._blocked_timeout_s)
            except DeadlineError as exc:
                where = _innermost("\n".join(exc.__notes__))
                self.lost = f"{self.child.name} did nothing else for {self._blocked_timeout_s:g} s because user code blocked it{where}"
                self._tell(f"{self.lost}; it is replaced. Await there, or make it a plain function, which gets a thread")
                await self.child.kill()
            except WorkerError:
                return
            await asyncio.sleep(self._blocked_timeout_s / 4)

    async def end(self, *, timeout_s: float) -> None:
        self._watching.cancel()
        await (self.child.stop(timeout_s=timeout_s) if timeout_s else self.child.kill())
        await asyncio.gather(self._watching, return_exceptions=True)


class Seat:
    """A place for one episode in a process."""

    def __init__(self, process: _Process, number: int) -> None:
        self.number = number
        self._process = process

    async def call(self, method: str, request: Any, kind: type[T], *, timeout_s: float) -> T:
        """Call the process.

        Raises:
            CodeError: user code raised.
            LostError: the process ended.
            DeadlineError: no answer came in time.
        """
        try:
            return wire.decode(kind, await self._process.child.call(method, wire.encode(request), timeout_s=timeout_s))
        except DeathError as exc:
            raise LostError(self._process.lost or f"user code may have ended its process: {exc}") from exc


class PlayPool:
    """A pool of `num_processes` processes that play one agent, environment or set of tools.

    Attributes:
        tools: tools that are described to models; known once the pool has been entered.
    """

    def __init__(
        self, request: PlayLoadRequest, *, num_processes: int, num_episodes: int, log_dir: Path | None, blocked_timeout_s: float = 20.0,
        allowed: Collection[str] = (), host: str = LOOPBACK, tell: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """Prepare the pool; its processes start on entering it.

        Args:
            num_episodes: episodes that one process plays at the same time.
            blocked_timeout_s: seconds for which user code may block a process.
            allowed: environment variables that the processes see although they look like secrets.
            host: name or address under which agents reach the proxy.
            tell: called with a sentence when a process had to be replaced.
        """
        self.tools: tuple[Tool, ...] = ()
        self._request = request
        self._num_episodes = num_episodes
        self._log_dir = log_dir
        self._blocked_timeout_s = blocked_timeout_s
        self._hidden = secret_variables(os.environ, allowed=allowed)
        self._host = host
        self._tell = tell
        self._processes: list[_Process | None] = [None] * num_processes
        self._starting = [asyncio.Lock() for _ in range(num_processes)]
        self._draining: set[_Process] = set()
        self._places = Places(num_processes * num_episodes)
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Self:
        try:
            await gather_all(self._living(index) for index in range(len(self._processes)))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        processes = [process for process in self._processes if process is not None] + list(self._draining)
        await asyncio.gather(*(process.end(timeout_s=_STOP_TIMEOUT_S) for process in processes))

    @asynccontextmanager
    async def seat(self, off_the_clock: Waiting = on_the_clock) -> AsyncIterator[Seat]:
        """Give an episode a place, for which it waits `off_the_clock`; on leaving, its calls that still run are ended.

        Raises:
            CodeError, WorkerError, DeadlineError: a replacement process does not start.
        """
        async with self._places.taken(off_the_clock):
            process = await self._choose()
            process.num_taken += 1
            seat = Seat(process, next(self._numbers))
            try:
                yield seat
            finally:
                try:
                    await asyncio.shield(self._leave(process, seat))
                finally:
                    process.num_taken -= 1
                    await self._end_if_retired(process)

    async def _choose(self) -> _Process:
        """Return the process that plays least."""
        def load(index: int) -> int:
            process = self._processes[index]
            return 0 if process is None or not process.child.alive else process.num_taken

        return await self._living(min(range(len(self._processes)), key=load))

    async def _living(self, index: int) -> _Process:
        async with self._starting[index]:
            process = self._processes[index]
            if process is not None and process.child.alive and not process.retired:
                return process
            if process is not None and not process.child.alive:
                await process.end(timeout_s=0)
            process = self._processes[index] = await self._start(index)
            return process

    async def _start(self, index: int) -> _Process:
        log = self._log_dir / f"play-{index}.log" if self._log_dir else None
        env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **direct(os.environ, self._host)}
        spec = ChildSpec(f"play {index}", "offbeat.agents.worker:PlayWorker", env, log, without=self._hidden)
        child = await Child.start(spec, timeout_s=_START_TIMEOUT_S)
        try:
            self.tools = wire.decode(PlayLoaded, await child.call("load", wire.encode(self._request), timeout_s=_START_TIMEOUT_S)).tools
        except BaseException:
            await child.kill()
            raise
        return _Process(child, blocked_timeout_s=self._blocked_timeout_s, tell=self._tell)

    async def _leave(self, process: _Process, seat: Seat) -> None:
        with contextlib.suppress(WorkerError):
            try:
                await process.child.call("close", wire.encode(CloseRequest(seat.number)), timeout_s=_CLOSE_TIMEOUT_S)
            except DeadlineError:  # a thread that nothing can end, or a close() that hangs
                self._retire(process)

    def _retire(self, process: _Process) -> None:
        process.retired = True
        self._draining.add(process)
        for index, other in enumerate(self._processes):
            if other is process:
                self._processes[index] = None

    async def _end_if_retired(self, process: _Process) -> None:
        if process.retired and process.num_taken == 0 and process in self._draining:
            self._draining.discard(process)
            await process.end(timeout_s=0)


def _innermost(stacks: str) -> str:
    """Return the innermost place in the main thread, the first of `stacks`, as the end of a sentence."""
    main = stacks.partition("\nthread ")[2].partition("\nthread ")[0]
    places = [line.strip() for line in main.splitlines() if line.strip().startswith("File ")]
    return f" at {places[-1].removeprefix('File ')}" if places else ""
