"""Deadlines of episodes and groups, which stand still during waits that are not the episode's own.

A group's deadline, `rollout.episode_timeout_s`, stands still while rewards are computed, while an episode waits for a place, and while
engines sleep. Each reward call has its own deadline, and before it starts, a group waits only for other groups' rewards. If that time
counted, a reward that hangs now and then would fail the prompts that wait for it.

The deadline of an agent's episode, `agent.timeout_s`, stands still during requests to engines as well (`requests_off`). They have deadlines
of their own, and busy engines would otherwise lose the longest episodes. An agent that asks without end is ended by a deadline that counts
requests, also where that of its group stands still because other episodes of the group wait for a place. It is a little shorter than the
group's, so that such an episode fails alone.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Self, TypeVar

from offbeat.aio import HaltingClock
from offbeat.errors import DeadlineError
from offbeat.inference.sampling import Sample, Sampling
from offbeat.rollout.episode import Episode

T = TypeVar("T")

_NUM_TICKS = 20
_OF_GROUP = 0.9
"""The deadline of one episode with its requests, as a part of its group's."""


class EpisodeClock:
    """Limits its body to `timeout_s` seconds, not counting the time in which it stands still. Use as `async with`.

    It counts ticks of the event loop instead of reading the time, so that a blocked loop or a stopped process does not end episodes:
    answers that came in the meantime are processed first.

    Raises:
        DeadlineError: the deadline passed.
    """

    def __init__(self, name: str, timeout_s: float, *, engines: HaltingClock | None = None) -> None:
        """`name` names the deadline in messages; this clock stands still also while that of the `engines` does, as they sleep."""
        self._name = name
        self._timeout_s = timeout_s
        self._engines = engines
        self._ticks_left = _NUM_TICKS
        self._num_stopped = 0
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        self._wait_for_tick()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        self._next.cancel()
        try:
            await self._scope.__aexit__(kind, exc, traceback)  # type: ignore[arg-type]
        except TimeoutError as late:
            raise DeadlineError(f"waiting for {self._name} passed its deadline of {self._timeout_s:g} s") from late

    async def stand_still(self, waiting: Awaitable[T]) -> T:
        """Return the result of `waiting`; the time it takes does not count."""
        self._num_stopped += 1
        try:
            return await waiting
        finally:
            self._num_stopped -= 1

    def _wait_for_tick(self) -> None:
        self._next = asyncio.get_running_loop().call_later(self._timeout_s / _NUM_TICKS, self._tick)

    def _tick(self) -> None:
        if not self._num_stopped and not (self._engines is not None and self._engines.halted):
            self._ticks_left -= 1
        if self._ticks_left:
            self._wait_for_tick()
        else:
            self._scope.reschedule(asyncio.get_running_loop().time())


def requests_off(clock: EpisodeClock, episode: Episode) -> Episode:
    """Return the episode whose requests to engines do not count on `clock`."""
    async def generate(prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        return await clock.stand_still(episode.generate(prompt, sampling, n=n, session=session))

    return replace(episode, generate=generate)


class AgentClock(EpisodeClock):
    """Limits an agent's own work, and its whole episode with requests to engines; past either, a DeadlineError names the setting."""

    def __init__(self, timeout_s: float, episode: Episode) -> None:
        """`timeout_s` is `agent.timeout_s`; the episode has the deadline of its group."""
        super().__init__("an episode (agent.timeout_s)", timeout_s)
        self._whole = EpisodeClock(
            f"an episode with its requests ({_OF_GROUP} of rollout.episode_timeout_s)", _OF_GROUP * episode.timeout_s,
            engines=episode.engines)

    async def __aenter__(self) -> Self:
        await self._whole.__aenter__()
        return await super().__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        try:
            await super().__aexit__(kind, exc, traceback)
        finally:
            await self._whole.__aexit__(kind, exc, traceback)


def agent_clock(timeout_s: float) -> EpisodeClock:
    """Return the deadline of an agent's own work alone, `agent.timeout_s`."""
    return EpisodeClock("an episode (agent.timeout_s)", timeout_s)
