"""The reward process: loads functions by their dotted names and scores completions with them. Apart from this, only user code runs in it.

All completions of a group come in one call if one of the functions takes them so, and else one by one.

A call that exceeds the memory limit ends the process, because its state is then unknown.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from offbeat.data import wire
from offbeat.data.reward import FailedReward, NamedReward, check_reward, weigh
from offbeat.data.row import Row
from offbeat.errors import WorkerError
from offbeat.rollout.reward_functions import RewardFunction
from offbeat.user_code.handshake import enter


@dataclass(frozen=True)
class RewardLoadRequest:
    """Request to load reward functions: `reward`, the only one, or several with `weights` by their names."""

    reward: str
    weights: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardsLoaded:
    """Whether the rewards are to have the completions of a group in one call."""

    of_group: bool


@dataclass(frozen=True)
class RewardRequest:
    """A completion to score, with the row of its prompt."""

    completion: str
    row: Row


@dataclass(frozen=True)
class GroupRequest:
    """Completions to score in one call, with the row of their prompt."""

    completions: tuple[str, ...]
    row: Row


@dataclass(frozen=True)
class ScoredCompletion:
    """Reward of a completion, with its parts by name if it has any; or the reason why there is none."""

    reward: float
    failure: str = ""
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoredGroup:
    """The rewards of a group's completions, in their order."""

    scored: tuple[ScoredCompletion, ...]


class RewardWorker:
    """Handler of a reward process: `load` once, then `score`, or `score_group` where a reward takes whole groups."""

    def __init__(self) -> None:
        self._functions: list[RewardFunction] = []
        self._weights: dict[str, float] = {}
        self._memory_bytes = 0

    def handle(self, method: str, payload: bytes) -> bytes:
        if method == "load":
            handshake = enter(payload)
            self._memory_bytes = handshake.memory_bytes
            return wire.encode(self._load(wire.decode(RewardLoadRequest, handshake.load)))
        if method == "score_group":
            group = wire.decode(GroupRequest, payload)
            return wire.encode(ScoredGroup(self._score_group(group.completions, group.row)))
        request = wire.decode(RewardRequest, payload)
        [scored] = self._score_group((request.completion,), request.row)
        return wire.encode(scored)

    def _load(self, request: RewardLoadRequest) -> RewardsLoaded:
        self._weights = request.weights
        self._functions = [RewardFunction(name, may_miss=bool(self._weights)) for name in self._weights or (request.reward,)]
        return RewardsLoaded(any(function.takes_group for function in self._functions))

    def _score_group(self, completions: Sequence[str], row: Row) -> tuple[ScoredCompletion, ...]:
        """Score completions with all functions; raises WorkerError if memory ran out, after which this process must be ended."""
        assert self._functions, "score before load"
        try:
            found = [function.values(completions, row) for function in self._functions]
        except MemoryError:
            found = []
        if not found:  # raised outside the handler, where the memory that the call took is free again
            raise WorkerError(f"it took more memory than rollout.reward_memory_bytes = {self._memory_bytes}")
        if not self._weights:
            return tuple(_scored(check_reward(value)) for value in found[0])
        return tuple(_scored(weigh(dict(zip(self._weights, values, strict=True)), self._weights)) for values in zip(*found, strict=True))


def _scored(reward: float) -> ScoredCompletion:
    if isinstance(reward, FailedReward):
        return ScoredCompletion(math.nan, reward.reason)
    return ScoredCompletion(float(reward), parts=reward.parts if isinstance(reward, NamedReward) else {})
