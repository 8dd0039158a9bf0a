"""Notices that engines idle because all episodes that may be played wait for something else. Pure; driven by the executor.

It counts the time in which groups run and no more may be admitted; where no group runs, engines wait for the trainer. Without a call to an
engine, groups wait for their rewards, or else for their environments and tools. To keep engines busy, the number of episodes at the same
time has to grow by the factor (wait + generation) / generation, e.g. 4 for 3 s of waiting and 1 s of generation. It is limited either by
the places of user code, for which admitted episodes wait, or by a setting that admits no further groups.
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
"""The largest factor that a hint states; engines that are called so rarely tell little of how long a call takes."""


@dataclass(frozen=True)
class Limit:
    """A limit on the episodes that are played at the same time, in words for the hint.

    Attributes:
        playing: noun for the episodes that wait, such as "groups".
        said: the limit, as a sentence.
        raised: returns the setting for a factor, such as "rollout.max_concurrent_rollouts = 64"; None where a hint should not advise it.
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
    """Return the limit on how far groups run ahead of the trainer; a hint does not raise it, because it affects learning."""
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


def waits_besides(workflow: str) -> str:
    """Return the noun for a workflow's waits besides engines and rewards, such as "their tools"; "" if there are none."""
    known = {
        "single_turn": "", "tool_loop": "their tools", "gym": "their environments", "agent": "their tools and environments"}
    return known.get(workflow, f"what {workflow} does besides")


class IdleHint:
    """Adds up for how long no engine was asked while groups ran and no more episodes could be played."""

    def __init__(
        self, tell: Callable[[str], None], *, num_running: Callable[[], int], limit: Callable[[], Limit | None],
        places: Limit | None = None, besides: str = "their environments", reward_workers: int = 1,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to count.

        Args:
            tell: called once with the hint.
            num_running: number of groups that run.
            limit: returns the limit that keeps further groups from being admitted; None while they may be.
            places: the limit for which episodes are `queueing`; it comes before `limit`.
            besides: see `waits_besides`.
            reward_workers: calls of `scoring` that are answered at the same time.
            now_s: a clock.
        """
        self._tell, self._num_running, self._limit, self._places, self._now_s = tell, num_running, limit, places, now_s
        self._besides, self._reward_workers = besides, reward_workers
        self._num_calls = self._num_queued = self._num_scored = 0
        self._since_s = now_s()
        self._waits = _Waits()
        self._held_by: Limit | None = None
        self._told = False

    def look(self) -> None:
        """Note that groups were admitted or have ended: the time up to here counts under the limit before."""
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
    def scoring(self) -> Iterator[None]:
        """Count a call of the reward as asked during the body."""
        self._pass()
        self._num_scored += 1
        try:
            yield
        finally:
            self._pass()
            self._num_scored -= 1

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
        self._waits.add(passed_s, num_calls=self._num_calls, num_scored=self._num_scored)
        if self._waits.whole_s < _WINDOW_S:
            return
        waits, self._waits = self._waits, _Waits()
        if waits.idle_s > _TELL_SHARE * waits.whole_s and (waits.mostly_rewards or self._besides):
            self._told = True
            self._tell(self._hint(waits, limit))

    def _hint(self, waits: "_Waits", limit: Limit) -> str:
        share = waits.idle_s / waits.whole_s
        awaited = "their rewards" if waits.mostly_rewards else self._besides
        said = (
            f"engines had nothing to do for {share:.0%} of the last minute in which groups ran, as all {limit.playing} waited for"
            f" {awaited}")
        if not waits.mostly_rewards:
            return f"{said}; {_more(share, limit)}"
        if waits.num_scored > self._reward_workers:
            return (
                f"{said}, which {waits.num_scored:.0f} of them on average asked for at the same time; make the reward faster, or raise"
                f" rollout.reward_workers = {self._reward_workers}")
        return f"{said}; make the reward faster; or else, {_more(share, limit)}"


@dataclass
class _Waits:
    """Seconds in which groups ran: all, without a call to an engine, and of the latter with calls of the reward."""

    whole_s: float = 0.0
    idle_s: float = 0.0
    reward_s: float = 0.0
    scored_s: float = 0.0

    def add(self, passed_s: float, *, num_calls: int, num_scored: int) -> None:
        self.whole_s += passed_s
        if not num_calls:
            self.idle_s += passed_s
            self.reward_s += passed_s if num_scored else 0.0
            self.scored_s += num_scored * passed_s

    @property
    def mostly_rewards(self) -> bool:
        return 2 * self.reward_s > self.idle_s

    @property
    def num_scored(self) -> float:
        """Mean number of calls of the reward, where there are some and engines idle."""
        return self.scored_s / self.reward_s


def _more(share: float, limit: Limit) -> str:
    """Return the limit, and the factor that would keep engines busy, as the end of a sentence."""
    times = min(1 / (1 - share), _MOST_TIMES) if share < 1 else _MOST_TIMES
    factor = f"{times:.1f} times" if times < _MOST_TIMES else f"{_MOST_TIMES:.0f} times or more"
    todo = f"; set {limit.raised(times)}" if limit.raised is not None else ""
    return f"{limit.said}, and {factor} as many {limit.noun} would keep the engines busy{todo}"
