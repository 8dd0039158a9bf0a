"""Measures for how long engines idle because all episodes that may be played wait for something else. Pure; driven by the executor.

It counts the time in which groups run and no more may be admitted; where no group runs, engines wait for the trainer. Without a call to an
engine, groups wait for their rewards, or else for their environments and tools. The number of episodes at the same time is limited either
by the places of user code, for which admitted episodes wait, or by a setting that admits no further groups. Each minute of such time is
reported; `controller.diagnosis` says when it is a reason for advice.
"""

import time
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from offbeat.types import Clock

_WINDOW_S = 60.0

Limit = Literal["running", "staleness", "places"]
"""The limit on episodes at the same time: rollout.max_concurrent_rollouts, rollout.max_head_offpolicyness, or the places of user code."""


class Admission(Protocol):
    """Says which groups run and how many more may; `staleness.Gate` is one."""

    @property
    def running(self) -> Sized: ...

    @property
    def capacity(self) -> int: ...

    @property
    def max_running(self) -> int: ...


@dataclass
class WaitingMinute:
    """A minute or more in which groups ran and no more episodes could be played, in seconds.

    Attributes:
        limit: the limit on episodes at its end.
        whole_s: all of it.
        idle_s: of `whole_s`, without a call to an engine.
        reward_s: of `idle_s`, with calls of the reward.
        scored_s: `reward_s` times the calls of the reward at the same time.
    """

    limit: Limit = "running"
    whole_s: float = 0.0
    idle_s: float = 0.0
    reward_s: float = 0.0
    scored_s: float = 0.0

    def add(self, passed_s: float, *, num_calls: int, num_scored: int) -> None:
        """Count a time in which so many calls of engines and of the reward were under way."""
        self.whole_s += passed_s
        if not num_calls:
            self.idle_s += passed_s
            self.reward_s += passed_s if num_scored else 0.0
            self.scored_s += num_scored * passed_s

    @property
    def idle_share(self) -> float:
        """Share of the time without a call to an engine, such as 0.75."""
        return self.idle_s / self.whole_s

    @property
    def mostly_rewards(self) -> bool:
        """Whether groups waited for their rewards in most of the time without a call to an engine."""
        return 2 * self.reward_s > self.idle_s

    @property
    def num_scored(self) -> float:
        """Mean number of calls of the reward, where there are some and engines idle."""
        return self.scored_s / self.reward_s


class IdleListener(Protocol):
    """Hears of each minute."""

    def report_minute(self, minute: WaitingMinute) -> None:
        """Called at its end."""
        ...


class NoListener:
    """Hears of nothing."""

    def report_minute(self, minute: WaitingMinute) -> None:
        """Do nothing."""


class IdleMeter:
    """Adds up for how long no engine was asked while groups ran and no more episodes could be played."""

    def __init__(self, admission: Admission, listener: IdleListener, *, has_places: bool = False, now_s: Clock = time.monotonic) -> None:
        """`has_places` says whether episodes that are `queueing` wait for a place; that limit comes before those of `admission`."""
        self._admission, self._listener, self._has_places, self._now_s = admission, listener, has_places, now_s
        self._num_calls = self._num_queued = self._num_scored = 0
        self._since_s = now_s()
        self._minute = WaitingMinute()
        self._held_by: Limit | None = None

    def look(self) -> None:
        """Note a change, such as that groups were admitted or have ended: the time up to here counts under the limit before."""
        now_s, limit = self._now_s(), self._held_by
        passed_s, self._since_s = now_s - self._since_s, now_s
        self._held_by = self._limit()
        if limit is None:
            return
        self._minute.add(passed_s, num_calls=self._num_calls, num_scored=self._num_scored)
        if self._minute.whole_s < _WINDOW_S:
            return
        minute, self._minute = self._minute, WaitingMinute()
        minute.limit = limit
        self._listener.report_minute(minute)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Count an engine as asked during the body."""
        self.look()
        self._num_calls += 1
        try:
            yield
        finally:
            self.look()
            self._num_calls -= 1

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Count a call of the reward as asked during the body."""
        self.look()
        self._num_scored += 1
        try:
            yield
        finally:
            self.look()
            self._num_scored -= 1

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Count an episode as waiting for a place during the body."""
        self._num_queued += 1
        self.look()
        try:
            yield
        finally:
            self._num_queued -= 1
            self.look()

    def _limit(self) -> Limit | None:
        """Return the limit that keeps further episodes from being played; None if they may be, or no group runs."""
        admission = self._admission
        if not (num_running := len(admission.running)):
            return None
        if self._has_places and self._num_queued:
            return "places"
        if admission.capacity:
            return None
        return "running" if num_running >= admission.max_running else "staleness"
