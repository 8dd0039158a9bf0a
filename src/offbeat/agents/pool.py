"""Processes that run the code of users: agents, tools and environments. Each plays many episodes at the same time.

Episodes that await do not disturb each other. A process whose event loop stands still, or that dies, is replaced; its episodes end with
`LostError`, and may be played again from the beginning. If an episode ends while a thread of its still runs, the process takes no further
episodes, and is ended as soon as the others are through.

    PlayPool.seat      consumes free places; produces episodes in processes; waits for a place; woken by episodes that end
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from offbeat.agents.worker import CloseRequest, PlayLoaded, PlayLoadRequest
from offbeat.chat.messages import Tool
from offbeat.config.agent import AgentConfig
from offbeat.data import wire
from offbeat.errors import CodeError, DeadlineError, DeathError, WorkerError
from offbeat.types import Notes
from offbeat.user_code.places import Waiting, on_the_clock
from offbeat.user_code.pool import CodePool, CodeProcess, CodeRole

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 5.0


class LostError(CodeError):
    """The process that played this episode ended, perhaps because of another one; the episode may be played again."""


class Seat:
    """A place for one episode in a process."""

    def __init__(self, process: CodeProcess, number: int) -> None:
        self.number = number
        self._process = process

    async def call(self, method: str, request: Any, kind: type[T], *, timeout_s: float) -> T:
        """Call the process; raises CodeError if user code did, LostError if it ended, DeadlineError if no answer came in time."""
        try:
            return wire.decode(kind, await self._process.child.call(method, wire.encode(request), timeout_s=timeout_s))
        except DeathError as exc:
            raise LostError(self._process.lost or f"user code may have ended its process: {exc}") from exc


class PlayPool:
    """A pool of processes that play one agent, environment or set of tools; `tools`, described to models, are known once entered."""

    def __init__(self, request: PlayLoadRequest, config: AgentConfig, *, log_dir: Path | None, notes: Notes | None = None) -> None:
        """Prepare the pool; its processes start on entering it.

        Args:
            config: number of processes and of the episodes that each plays at the same time, memory limit, variables and deadlines.
            notes: takes a note when a process had to be replaced.
        """
        self.tools: tuple[Tool, ...] = ()
        self._pool = CodePool(
            CodeRole(
                "play {}", "offbeat.agents.worker:PlayWorker", log="play-{}.log", load=wire.encode(request),
                functions=(request.program, *request.stage), memory_bytes=config.memory_bytes, allowed=config.env, host=config.reached_at,
                blocked_timeout_s=config.blocked_timeout_s),
            num_processes=config.processes, num_each=config.episodes_per_process, log_dir=log_dir, notes=notes)
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Self:
        await self._pool.__aenter__()
        self.tools = wire.decode(PlayLoaded, self._pool.loaded).tools
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._pool.__aexit__(*exc)

    @asynccontextmanager
    async def seat(self, off_the_clock: Waiting = on_the_clock) -> AsyncIterator[Seat]:
        """Give an episode a place, for which it waits `off_the_clock`; on leaving, its calls that still run are ended.

        Raises CodeError, WorkerError or DeadlineError if a replacement process does not start.
        """
        async with self._pool.place(off_the_clock) as index:
            process = await self._pool.process(index)
            process.num_users += 1
            seat = Seat(process, next(self._numbers))
            try:
                yield seat
            finally:
                try:
                    await asyncio.shield(self._leave(process, seat))
                finally:
                    process.num_users -= 1
                    await self._pool.end_if_retired(process)

    async def _leave(self, process: CodeProcess, seat: Seat) -> None:
        with contextlib.suppress(WorkerError):
            try:
                await process.child.call("close", wire.encode(CloseRequest(seat.number)), timeout_s=_CLOSE_TIMEOUT_S)
            except DeadlineError:  # a thread that nothing can end, or a close() that hangs
                self._pool.retire(process)
