"""The pool of processes that run user code, so that it cannot block, crash or leak into the process that trains, nor read its secrets.

Rewards, agents with their tools and environments, metrics, and the check of an own objective are roles of it: a role says which handler
runs in the processes and what it loads. The pool starts them, hides secrets, limits memory, keeps logs, and replaces processes that ended.
Its callers, such as `RewardPool` and `PlayPool`, decide what to ask, and what a failure means.

    CodePool.place      consumes free places; produces callers with a process; waits for a place; woken by callers that leave
    CodeProcess._watch  consumes answers to pings; produces the end of a process that gives none; waits for the deadline of each
"""

import asyncio
import os
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from offbeat.aio import gather_all
from offbeat.errors import DeadlineError, WorkerError
from offbeat.hosts import LOOPBACK, direct
from offbeat.process.child import Child, ChildSpec
from offbeat.types import NoNotes, Notes
from offbeat.user_code.given import pack
from offbeat.user_code.handshake import Handshake
from offbeat.user_code.places import Places, Waiting, on_the_clock
from offbeat.user_code.variables import secret_variables

_STOP_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class CodeRole:
    """The work of a pool's processes, and what it needs.

    Attributes:
        title: name of a process in messages; "reward {}" makes "reward 0".
        target: "module:Class" of the handler; its first call is `load`, whose argument `handshake.enter` reads.
        log: name of a process's log file, such as "reward-{}.log".
        functions: names of the functions that are loaded; those given as objects are sent along.
        memory_bytes: memory limit of each process; 0 for none.
        allowed: environment variables that the processes see although they look like secrets.
        hides_secrets: whether other such variables are withheld.
        host: name or address that processes reach without a proxy, besides this machine's own.
        start_timeout_s: seconds to start a process, and to load.
        blocked_timeout_s: seconds that user code may block a process's event loop before it is replaced; 0 for processes without a loop.
    """

    title: str
    target: str
    log: str = ""
    load: bytes = b""
    functions: tuple[str, ...] = ()
    memory_bytes: int = 0
    allowed: Collection[str] = ()
    hides_secrets: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)
    host: str = LOOPBACK
    start_timeout_s: float = 120.0
    blocked_timeout_s: float = 0.0


class CodeProcess:
    """One process.

    Attributes:
        num_users: number of callers that use it.
        retired: whether it takes no further ones.
        lost: the reason why the pool has ended it; "" if it has not.
    """

    def __init__(self, child: Child, *, blocked_timeout_s: float, notes: Notes) -> None:
        self.child = child
        self.num_users = 0
        self.retired = False
        self.lost = ""
        self._blocked_timeout_s = blocked_timeout_s
        self._notes = notes
        self._watching = asyncio.create_task(self._watch(), name=f"watch {child.name}") if blocked_timeout_s else None

    async def _watch(self) -> None:
        while self.child.alive:
            try:
                await self.child.call("ping", timeout_s=self._blocked_timeout_s)
            except DeadlineError as exc:
                where = _innermost("\n".join(exc.__notes__))
                self.lost = f"{self.child.name} did nothing else for {self._blocked_timeout_s:g} s because user code blocked it{where}"
                self._notes.note("user_code", f"{self.lost}; it is replaced. Await there, or make it a plain function, which gets a thread")
                await self.child.kill()
            except WorkerError:
                return
            await asyncio.sleep(self._blocked_timeout_s / 4)

    async def end_process(self, *, timeout_s: float = 0) -> None:
        """End the process, after its present call if `timeout_s` allows, else at once."""
        if self._watching is not None:
            self._watching.cancel()
        await (self.child.stop(timeout_s=timeout_s) if timeout_s else self.child.kill())
        if self._watching is not None:
            await asyncio.gather(self._watching, return_exceptions=True)


class CodePool:
    """A pool of processes of one role. Use as `async with`.

    Attributes:
        loaded: answer of the process that was started last to `load`.
        hidden: names of the environment variables that are withheld.
    """

    def __init__(
        self, role: CodeRole, *, num_processes: int, num_each: int = 1, log_dir: Path | None = None, notes: Notes | None = None,
    ) -> None:
        """Prepare the pool; its processes start on entering it.

        Args:
            num_each: callers that use one process at the same time.
            notes: takes a note when a process was replaced because user code blocked it.
        """
        self.loaded = b""
        self.hidden = secret_variables(os.environ, allowed=role.allowed) if role.hides_secrets else frozenset()
        self._role = role
        self._handshake = Handshake(role.load, role.memory_bytes, pack(role.functions)).pack()
        self._log_dir = log_dir
        self._notes = notes or NoNotes()
        self._processes: list[CodeProcess | None] = [None] * num_processes
        self._starting = [asyncio.Lock() for _ in range(num_processes)]
        self._num_taken = [0] * num_processes
        self._draining: set[CodeProcess] = set()
        self._places = Places(num_processes * num_each)

    async def __aenter__(self) -> Self:
        try:
            await gather_all(self.process(index) for index in range(len(self._processes)))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        processes = [process for process in self._processes if process is not None] + list(self._draining)
        await asyncio.gather(*(process.end_process(timeout_s=_STOP_TIMEOUT_S) for process in processes))

    @asynccontextmanager
    async def place(self, off_the_clock: Waiting = on_the_clock) -> AsyncIterator[int]:
        """Wait `off_the_clock` for a place, and hold it during the body; gives the index of the process that is used least."""
        async with self._places.taken(off_the_clock):
            index = min(range(len(self._num_taken)), key=self._num_taken.__getitem__)
            self._num_taken[index] += 1
            try:
                yield index
            finally:
                self._num_taken[index] -= 1

    async def process(self, index: int) -> CodeProcess:
        """Return the process with this index, a new one if the last has ended or was retired.

        Raises:
            CodeError: user code cannot be loaded.
            WorkerError, DeadlineError: the process does not start.
        """
        async with self._starting[index]:
            process = self._processes[index]
            if process is not None and process.child.alive:
                return process
            if process is not None:
                await process.end_process()
            process = self._processes[index] = await self._start(index)
            return process

    @asynccontextmanager
    async def ending_on_error(self, process: CodeProcess) -> AsyncIterator[None]:
        """End the process if the body raises or is cancelled: the state of its user code is then unknown."""
        try:
            yield
        except BaseException:
            self._take_out(process)
            await process.end_process()
            raise

    def retire(self, process: CodeProcess) -> None:
        """Give the process to no further callers; `end_if_retired` ends it as soon as its callers have left."""
        process.retired = True
        self._draining.add(process)
        self._take_out(process)

    async def end_if_retired(self, process: CodeProcess) -> None:
        """End a retired process that nobody uses any more."""
        if process.retired and process.num_users == 0 and process in self._draining:
            self._draining.discard(process)
            await process.end_process()

    def _take_out(self, process: CodeProcess) -> None:
        self._processes = [None if each is process else each for each in self._processes]

    async def _start(self, index: int) -> CodeProcess:
        role = self._role
        log = self._log_dir / role.log.format(index) if self._log_dir is not None and role.log else None
        variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **direct(os.environ, role.host), **role.variables}
        spec = ChildSpec(role.title.format(index), role.target, variables, log, without=self.hidden)
        child = await Child.start(spec, timeout_s=role.start_timeout_s)
        try:
            self.loaded = await child.call("load", self._handshake, timeout_s=role.start_timeout_s)
        except BaseException:
            await child.kill()
            raise
        return CodeProcess(child, blocked_timeout_s=role.blocked_timeout_s, notes=self._notes)


def _innermost(stacks: str) -> str:
    """Return the innermost place in the main thread, the first of `stacks`, as the end of a sentence."""
    main = stacks.partition("\nthread ")[2].partition("\nthread ")[0]
    places = [line.strip() for line in main.splitlines() if line.strip().startswith("File ")]
    return f" at {places[-1].removeprefix('File ')}" if places else ""
