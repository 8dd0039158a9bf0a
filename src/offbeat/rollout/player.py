"""Plays one group with the user's code: its workflow plays the episodes, and its filter says whether the group is trained on.

Called by `executor`, which decides how many groups play at once, and settles each. An error of user code fails its own group alone.
"""

import asyncio
import inspect
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.aio import HaltingClock
from offbeat.config.rollout import RolloutConfig
from offbeat.data.row import Row
from offbeat.data.trajectory import Group
from offbeat.ending import ended, place_of_task
from offbeat.errors import CodeError, OffbeatError, describe, shorten
from offbeat.inference.sampling import Sample, Sampling
from offbeat.raised import FirstTracebacks, describe_at
from offbeat.rollout.accounts import Accounts
from offbeat.rollout.calls import GroupCalls
from offbeat.rollout.clock import EpisodeClock
from offbeat.rollout.dynamic import DynamicSampling
from offbeat.rollout.episode import Episode, Workflow
from offbeat.rollout.idle import IdleMeter
from offbeat.rollout.outcomes import GroupFailure, Kind, RolloutListener, failure_of, failure_to_ask, unwrap
from offbeat.rollout.randomness import seeded
from offbeat.rollout.trajectory_checks import ANY, TrajectoryChecks, members
from offbeat.types import Version
from offbeat.user_code.boundary import Caught

logger = logging.getLogger(__name__)

UNWIND_S = 5.0
"""Seconds that a workflow has to end once it is cancelled."""

MakeEpisode = Callable[[Row, int, Sampling], Episode]
Accept = Callable[[Group], bool]


def accept_all(_group: Group) -> bool:
    return True


class _RaisedError(Exception):
    """A workflow raised something that is no `Exception`, such as `SystemExit`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True)
class RolloutParts:
    """The parts that play, check and count the episodes of an executor.

    Attributes:
        make_episode: `make_episode(row, group_size, sampling)` binds a row to engines, rewards and the tokenizer.
        dynamic: rejects groups of equal rewards that the filter accepts; None rejects none.
        accounts: adds up the time of episodes, except in `rollout_batch`.
        has_places: whether episodes wait for a place of user code when they are off the clock.
        engines: the clock that engines halt while they sleep, so that deadlines of episodes stand still.
        seed: of the random numbers of training's requests; None leaves them to the engines.
    """

    workflow: Workflow
    make_episode: MakeEpisode
    accept: Accept = accept_all
    dynamic: DynamicSampling | None = None
    checks: TrajectoryChecks = ANY
    accounts: Accounts = field(default_factory=Accounts)
    has_places: bool = False
    engines: HaltingClock = field(default_factory=HaltingClock)
    seed: int | None = None
    running_s: float = 0.0


class GroupPlayer:
    """Calls a workflow and a filter, under a clock that stands still while they wait for others."""

    def __init__(self, parts: RolloutParts, *, config: RolloutConfig, idle: IdleMeter, listener: RolloutListener) -> None:
        """Set up the player; `idle` counts the waits of episodes."""
        self._warn = listener.warn
        self._workflow = parts.workflow
        self._make_episode = parts.make_episode
        self._accept = parts.accept
        self._engines = parts.engines
        self._config = config
        self._idle = idle
        self._tracebacks = FirstTracebacks()

    async def play(
        self, prompt_id: str, row: Row, group_size: int, sampling: Sampling, *, version: Version, accounts: Accounts,
        calls: GroupCalls | None = None,
    ) -> tuple[Group, GroupFailure | None]:
        """Play one group, and say why it failed, which is data: the group then has the reason in place of trajectories.

        Args:
            sampling: its seed is that of the group, on which those of requests depend.
            calls: record the group's calls of engines; None records none.
        """
        with Caught() as caught:
            episode = self._make_episode(row, group_size, replace(sampling, seed=None))
        if isinstance(exc := caught.error, Exception):  # the tokenizer or the chat template cannot handle the prompt
            return Group(prompt_id, version, rejected=describe(exc)), failure_to_ask(exc)
        if calls is not None:
            episode = calls.watched(prompt_id, episode)
        if sampling.seed is not None:
            episode = seeded(episode, sampling.seed)
        here = Path.cwd()
        try:
            with Caught() as caught:  # any error of a workflow rejects only its own group
                async with EpisodeClock(f"group {prompt_id}", self._config.episode_timeout_s, engines=self._engines) as clock:
                    returned = await self._call_within_bounds(replace(
                        self._watched(episode, clock), account=partial(accounts.open, prompt_id), measured=accounts.measures.add))
                return Group(prompt_id, version, members(returned, group_size, workflow=self._config.workflow)), None
            raised = caught.take()
            error = unwrap(raised.error if isinstance(raised, _RaisedError) else raised)
            if isinstance(error, OffbeatError):
                return Group(prompt_id, version, rejected=describe(error)), failure_of(error)
            self._log(f"the workflow {self._config.workflow}", error)
            return Group(prompt_id, version, rejected=describe_at(error)), failure_of(error)
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # the cancellation is ours, not the workflow's
            failure = CodeError(f"the workflow {self._config.workflow} let a cancellation of its own escape: {exc!r}")
            return Group(prompt_id, version, rejected=str(failure)), failure_of(failure)
        finally:
            self._go_back(here, f"the workflow {self._config.workflow}")

    def _go_back(self, here: Path, who: str) -> None:
        """Undo a change of the working directory, which the whole process shares."""
        if Path.cwd() != here:
            os.chdir(here)
            self._warn(f"{who} has changed the working directory, which is the run's, too, so it was changed back; give paths in full")

    def _watched(self, episode: Episode, clock: EpisodeClock) -> Episode:
        """Return an episode that stops the clock while it waits for a place or a reward, and counts its waits in the hint."""

        async def generate(*arguments: Any, **named: Any) -> list[Sample]:
            with self._idle.calling():
                return await episode.generate(*arguments, **named)

        async def off_the_clock(waiting: Awaitable[Any]) -> Any:
            with self._idle.queueing():
                return await clock.stand_still(waiting)

        async def score(completions: Sequence[str], row: Row) -> list[float]:
            with self._idle.scoring():
                return await clock.stand_still(episode.score(completions, row))

        return replace(
            episode, generate=generate, off_the_clock=off_the_clock, score=score, timeout_s=self._config.episode_timeout_s,
            engines=self._engines)

    async def _call_within_bounds(self, episode: Episode) -> object:
        """Call the workflow. If it does not end within `UNWIND_S` of a cancellation, warn and leave it behind."""
        playing = asyncio.create_task(self._call_workflow(episode))
        try:
            await asyncio.wait([playing])
        except asyncio.CancelledError:
            for left in await ended([playing], within_s=UNWIND_S):
                self._warn(
                    f"the workflow {self._config.workflow} was cancelled and goes on, {place_of_task(left)}; let asyncio.CancelledError"
                    " pass there, as a bare except does not")
            raise
        return playing.result()

    async def _call_workflow(self, episode: Episode) -> object:
        with Caught(BaseException, passes=(Exception, asyncio.CancelledError, GeneratorExit)) as caught:
            playing: object = self._workflow(episode)
            if not inspect.isawaitable(playing):
                raise CodeError(f"the workflow {self._config.workflow} must be an async function, but calling it gave {shorten(playing)}")
            return await playing
        exc = caught.take()
        raise _RaisedError(exc) from exc  # it would end the event loop, or the task that awaits it

    def ask_filter(self, group: Group) -> tuple[Group, GroupFailure | None, Kind | None]:
        """Ask the user's filter; returns the group, and why it failed or is refused, if it is.

        If the filter raises, or does not return a yes or no, the group fails.
        """
        here = Path.cwd()
        answer: object = None
        with Caught(BaseException) as caught:
            answer = self._accept(group)
        self._go_back(here, "should_accept")
        if (exc := caught.error) is not None:
            self._log("should_accept", exc)
            return self._fail_filter(group, f"raised {describe_at(exc)}")
        if inspect.iscoroutine(answer):
            answer.close()
            return self._fail_filter(group, "must not be an async function, since it is called between two steps of the event loop")
        if not isinstance(answer, bool | np.bool_):
            return self._fail_filter(group, f"must return True or False, got {shorten(answer)}")
        if not answer:
            return replace(group, trajectories=(), rejected="not accepted by should_accept"), None, "not accepted"
        return group, None, None

    def _log(self, who: str, exc: BaseException) -> None:
        if told := self._tracebacks.take(exc):
            logger.warning("%s raised\n%s", who, told)

    def _fail_filter(self, group: Group, how: str) -> tuple[Group, GroupFailure, None]:
        reason = f"should_accept {how}"
        return replace(group, trajectories=(), rejected=reason), failure_of(CodeError(reason)), None


CALLERS = (GroupPlayer._call_workflow.__code__, GroupPlayer.ask_filter.__code__)
"""Functions that call user code on the event loop."""
