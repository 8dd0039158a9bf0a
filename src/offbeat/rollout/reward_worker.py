"""The reward process: loads one function by its dotted name and scores completions with it. Apart from this, only user code runs in it.

A function that `of_group` has marked gets all completions of a group in one call, and others one by one.

It sets its own memory limit before any user code runs. A call that exceeds the limit ends the process, because its state is then unknown.
"""

import math
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from offbeat.data import wire
from offbeat.data.functions import resolve
from offbeat.data.given import Given, receive
from offbeat.data.reward import JUDGE_PREFIX, FailedReward, NamedReward, check_reward, is_of_group
from offbeat.data.row import Row
from offbeat.errors import WorkerError, describe, printable, shorten
from offbeat.rollout.judges import judge_reward


@dataclass(frozen=True)
class LoadRequest:
    """Name of a reward function, the memory limit of its process (0 for none), and the function itself if it was given as an object."""

    reward: str
    memory_bytes: int = 0
    given: tuple[Given, ...] = ()


@dataclass(frozen=True)
class Loaded:
    """Whether the reward takes the completions of a group in one call."""

    of_group: bool


@dataclass(frozen=True)
class ScoreRequest:
    """A completion to score, with the row of its prompt."""

    completion: str
    row: Row


@dataclass(frozen=True)
class GroupRequest:
    """Completions to score in one call, with the row of their prompt."""

    completions: tuple[str, ...]
    row: Row


@dataclass(frozen=True)
class Scored:
    """Reward of a completion, with its parts by name if it has any; or the reason why there is none."""

    reward: float
    failure: str = ""
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoredGroup:
    """What each completion of a group is worth, in their order."""

    scored: tuple[Scored, ...]


class RewardWorker:
    """Handler of a reward process: `load` once, then `score`, or `score_group` where the reward is one of groups."""

    def __init__(self) -> None:
        self._reward: Callable[..., Any] | None = None
        self._name = ""
        self._memory_bytes = 0

    def handle(self, method: str, payload: bytes) -> bytes:
        if method == "load":
            return wire.encode(self._load(wire.decode(LoadRequest, payload)))
        if method == "score_group":
            group = wire.decode(GroupRequest, payload)
            return wire.encode(ScoredGroup(self._score_group(group.completions, group.row)))
        request = wire.decode(ScoreRequest, payload)
        return wire.encode(self._score(request.completion, request.row))

    def _load(self, request: LoadRequest) -> Loaded:
        self._name, self._memory_bytes = request.reward, request.memory_bytes
        if request.memory_bytes:
            resource.setrlimit(resource.RLIMIT_DATA, (request.memory_bytes, request.memory_bytes))
        receive(request.given)
        named_judge = self._name.startswith(JUDGE_PREFIX)
        self._reward = judge_reward(self._name.removeprefix(JUDGE_PREFIX)) if named_judge else resolve(self._name, kind="reward")
        return Loaded(is_of_group(self._reward))

    def _score(self, completion: str, row: Row) -> Scored:
        found = self._call(completion, row, shown=completion)
        return found if isinstance(found, Scored) else self._scored(found, completion)

    def _score_group(self, completions: tuple[str, ...], row: Row) -> tuple[Scored, ...]:
        found = self._call(list(completions), row, shown=completions[0])
        if isinstance(found, Scored):
            return (found,) * len(completions)
        if not isinstance(found, list | tuple) or len(found) != len(completions):
            wrong = self._failed(f"must return a list of {len(completions)} rewards, returned {shorten(found)}", completions[0])
            return (wrong,) * len(completions)
        return tuple(self._scored(each, completion) for each, completion in zip(found, completions, strict=True))

    def _call(self, *arguments: Any, shown: str) -> Any:
        """Return what the reward returned, or what it is worth that it failed.

        Raises:
            WorkerError: memory ran out; this process must be ended.
        """
        assert self._reward is not None, "score before load"
        try:
            return self._reward(*arguments)
        except MemoryError:
            pass
        except BaseException as exc:  # sys.exit() too, since restarting a process takes a second
            return self._failed(f"raised {describe(exc)}", shown)
        # Raised outside the handler, where the memory that the call took is free again.
        raise WorkerError(f"it took more memory than rollout.reward_memory_bytes = {self._memory_bytes}")

    def _scored(self, found: Any, completion: str) -> Scored:
        reward = check_reward(found)
        if isinstance(reward, FailedReward):
            return self._failed(f"returned what cannot be trained on: {reward.reason}", completion)
        return Scored(float(reward), parts=reward.parts if isinstance(reward, NamedReward) else {})

    def _failed(self, how: str, completion: str) -> Scored:
        return Scored(math.nan, printable(f"the reward {self._name} {how} (completion {completion[:60]!r})", most=1000))
