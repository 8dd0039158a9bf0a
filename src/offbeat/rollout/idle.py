"""Notices that engines idle because all episodes that may be played wait for their environments. Pure; driven by the executor.

Environments that wait need more episodes at the same time, by a factor of (wait + generation) / generation. What keeps them out is either
the places of user code, for which episodes wait that have been admitted, or a setting that admits no further groups.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from offbeat.config.agent import AgentConfig
from offbeat.config.rollout import RolloutConfig

_WINDOW_S = 60.0
_TELL_SHARE = 0.3
_MOST_TIMES = 20.0
"""The largest factor that is worth a number; engines that are asked so rarely tell little of how long a call takes."""


@dataclass(frozen=True)
class Limit:
    """What keeps more episodes from being played at the same time, in words for the hint.

    Attributes:
        playing: what is played, and waits for environments.
        said: the limit, as a sentence.
        raised: returns what to set for so many times as many; None where that is not for a hint to say.
    """

    playing: str
    said: str
    noun: str
    raised: Callable[[float], str] | None = None


def limit_of_running(config: RolloutConfig) -> Limit:
    """Return the limit on the number of groups that run."""
    name, value = "rollout.max_concurrent_rollouts", config.max_concurrent_rollouts
    most = (1 + config.max_head_offpolicyness) * config.consumer_batch_size

    def raised(times: float) -> str:
        wanted = math.ceil(value * times)
        ahead = f"; above {most}, rollout.max_head_offpolicyness or rollout.consumer_batch_size has to grow, too" if wanted > most else ""
        return f"{name} = {wanted}{ahead}"

    return Limit("groups", f"{name} = {value} keeps out more", "groups", raised)


def limit_of_staleness(config: RolloutConfig) -> Limit:
    """Return the limit on how far groups run ahead of the trainer, which is a question of what is learnt."""
    return Limit("groups", f"rollout.max_head_offpolicyness = {config.max_head_offpolicyness} keeps out more", "groups")


def limit_of_places(config: AgentConfig) -> Limit:
    """Return the limit on the number of episodes that user code plays at the same time."""
    processes, each = config.processes, config.episodes_per_process

    def raised(times: float) -> str:
        return (
            f"agent.episodes_per_process = {math.ceil(each * times)}, or as many times as many agent.processes if your code"
            " computes rather than waits")

    return Limit(
        "episodes that have a place", f"agent.processes = {processes} times agent.episodes_per_process = {each} are all the"
        " places there are, others wait for one", "places", raised)


class IdleHint:
    """Adds up for how long no engine was asked while groups ran and no more episodes could be played."""

    def __init__(
        self, tell: Callable[[str], None], *, num_running: Callable[[], int], limit: Callable[[], Limit | None],
        places: Limit | None = None, now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count.

        Args:
            tell: called once with the hint.
            num_running: number of groups that run.
            limit: returns what keeps further groups from being admitted; None while nothing does.
            places: what episodes wait for that are `queueing`, and that comes before `limit`.
            now_s: a clock.
        """
        self._tell, self._num_running, self._limit, self._places, self._now_s = tell, num_running, limit, places, now_s
        self._num_calls = self._num_queued = 0
        self._since_s = now_s()
        self._idle_s = self._busy_s = 0.0
        self._held_by: Limit | None = None
        self._told = False

    def look(self) -> None:
        """Note that groups were admitted or have ended: the time up to here counts under what held before."""
        self._pass()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Count an engine as asked during the body."""
        self._pass()
        self._num_calls += 1
        try:
            yield
        finally:
            self._pass()
            self._num_calls -= 1

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Count an episode as waiting for a place during the body."""
        self._num_queued += 1
        self._pass()
        try:
            yield
        finally:
            self._num_queued -= 1
            self._pass()

    def _pass(self) -> None:
        now_s, limit = self._now_s(), self._held_by
        passed_s, self._since_s = now_s - self._since_s, now_s
        queued = self._places if self._num_queued else None
        self._held_by = (queued or self._limit()) if self._num_running() else None
        if limit is None or self._told:
            return
        if self._num_calls:
            self._busy_s += passed_s
        else:
            self._idle_s += passed_s
        whole_s = self._idle_s + self._busy_s
        if whole_s < _WINDOW_S:
            return
        share = self._idle_s / whole_s
        self._idle_s = self._busy_s = 0.0
        if share > _TELL_SHARE:
            self._told = True
            self._tell(_hint(share, limit))


def _hint(share: float, limit: Limit) -> str:
    times = min(1 / (1 - share), _MOST_TIMES) if share < 1 else _MOST_TIMES
    factor = f"{times:.1f} times" if times < _MOST_TIMES else f"{_MOST_TIMES:.0f} times or more"
    todo = f"; set {limit.raised(times)}" if limit.raised is not None else ""
    return (
        f"engines had nothing to do for {share:.0%} of the last minute, as all {limit.playing} waited for their environments; {limit.said},"
        f" and {factor} as many {limit.noun} would keep the engines busy{todo}")
