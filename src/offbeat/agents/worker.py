"""A process of user code: it plays many episodes at the same time. Apart from this, only user code runs in it.

Coroutines of users share its event loop; plain functions get a thread each (`calling.call`). Each episode has a number, under which it is
opened, taken on and closed; closing it cancels its calls that still run. `PlayPool` calls this.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from offbeat.agents.environment import Environment, Stage, View
from offbeat.agents.environments.find import find_stage
from offbeat.agents.task import AgentTask, Played, played
from offbeat.chat.messages import Message, Tool
from offbeat.data import wire
from offbeat.data.row import Row
from offbeat.errors import OffbeatError
from offbeat.raised import FirstTracebacks
from offbeat.user_code.boundary import Caught
from offbeat.user_code.calling import blame, call
from offbeat.user_code.functions import check_takes, resolve
from offbeat.user_code.handshake import enter

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlayLoadRequest:
    """Request to load an agent, an environment or tools.

    Attributes:
        program: name of an agent's function; "" for an environment.
        stage: name of an environment, or names of tools.
        tools: whether `stage` names tools.
        options: of the environment, each such as "num_players=2".
    """

    program: str = ""
    stage: tuple[str, ...] = ()
    tools: bool = False
    options: tuple[str, ...] = ()
    step_timeout_s: float = 60.0


@dataclass(frozen=True)
class PlayLoaded:
    """Answer to `PlayLoadRequest`: the tools that were loaded."""

    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True)
class OpenRequest:
    """An episode to begin."""

    episode: int
    row: Row
    seed: int


@dataclass(frozen=True)
class StepRequest:
    """The model's answer in an episode."""

    episode: int
    answer: Message


@dataclass(frozen=True)
class RunRequest:
    """An agent to run."""

    episode: int
    task: AgentTask


@dataclass(frozen=True)
class CloseRequest:
    """An episode to end."""

    episode: int


@dataclass
class _Episode:
    environment: Environment | None = None
    calls: set[asyncio.Task[Any]] = field(default_factory=set)


class PlayWorker:
    """Handler of a process of user code: `load` once, then episodes."""

    def __init__(self) -> None:
        self._stage: Stage | None = None
        self._program: Callable[[AgentTask], Any] | None = None
        self._name = ""
        self._episodes: dict[int, _Episode] = {}
        self._tracebacks = FirstTracebacks()

    async def handle(self, method: str, payload: bytes) -> bytes:
        match method:
            case "load":
                return wire.encode(await self._load(wire.decode(PlayLoadRequest, enter(payload).load)))
            case "open":
                begin = wire.decode(OpenRequest, payload)
                return wire.encode(await self._of(begin.episode, self._open(begin)))
            case "step":
                step = wire.decode(StepRequest, payload)
                return wire.encode(await self._of(step.episode, self._step(step)))
            case "end":
                number = wire.decode(CloseRequest, payload).episode
                return wire.encode(await self._of(number, self._environment(number).end()))
            case "run":
                run = wire.decode(RunRequest, payload)
                return wire.encode(await self._of(run.episode, self._run_program(run.task)))
            case "close":
                await self._close(wire.decode(CloseRequest, payload).episode)
        return b""  # also of "ping", which asks whether the loop runs

    async def _load(self, request: PlayLoadRequest) -> PlayLoaded:
        _log_to_stderr()
        self._name = request.program or ", ".join(request.stage)
        if request.program:
            self._program = resolve(request.program, kind="agent.program")
            check_takes(self._program, request.program, ("task",), kind="agent.program")
            return PlayLoaded()
        self._stage = find_stage(request.stage, request.options, step_timeout_s=request.step_timeout_s, tools=request.tools)
        await self._stage.open()
        return PlayLoaded(self._stage.tools)

    async def _of(self, number: int, playing: Awaitable[Any]) -> Any:
        """Run a call as a part of an episode; raises CodeError if user code raised."""
        episode = self._episodes.setdefault(number, _Episode())
        task = asyncio.ensure_future(playing)
        episode.calls.add(task)
        try:
            with Caught(passes=(OffbeatError,)) as caught:
                return await task
            exc = caught.take()
            if told := self._tracebacks.take(exc):
                logger.warning("episode %d: %s raised\n%s", number, self._name, told)
            raise blame(exc, self._name) from exc
        finally:
            task.cancel()
            episode.calls.discard(task)

    async def _open(self, request: OpenRequest) -> View:
        assert self._stage is not None, "open before load"
        environment = self._episodes[request.episode].environment = self._stage.environment()
        return await environment.reset(request.row, request.seed)

    async def _step(self, request: StepRequest) -> View:
        return await self._environment(request.episode).step(request.answer)

    def _environment(self, number: int) -> Environment:
        environment = self._episodes[number].environment
        assert environment is not None, "step before open"
        return environment

    async def _run_program(self, task: AgentTask) -> Played:
        assert self._program is not None, "run before load"
        return played(await call(self._program, task), of=self._name)

    async def _close(self, number: int) -> None:
        episode = self._episodes.pop(number, None)
        if episode is None:
            return
        for running in episode.calls:
            running.cancel()
        if episode.calls:
            await asyncio.wait(episode.calls)
        if episode.environment is not None:
            await episode.environment.close()


def _log_to_stderr() -> None:
    """Send log messages of Offbeat's own modules to stderr, this process's log; logging of user code is left as it is."""
    ours = logging.getLogger("offbeat")
    if not ours.handlers:
        ours.addHandler(logging.StreamHandler())
        ours.setLevel(logging.INFO)
        ours.propagate = False
