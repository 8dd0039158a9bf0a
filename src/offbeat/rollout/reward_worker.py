"""The reward process: loads one function by its dotted name and scores completions with it. Apart from this, only user code runs in it.

It sets its own memory limit before any user code runs. A call that exceeds the limit ends the process, because its state is then unknown.
"""

import math
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from offbeat.data import wire
from offbeat.data.functions import resolve
from offbeat.data.reward import FailedReward, NamedReward, check_reward
from offbeat.data.row import Row
from offbeat.errors import WorkerError, describe, printable


@dataclass(frozen=True)
class LoadRequest:
    """Name of a reward function, and the memory limit of its process; 0 for none."""

    reward: str
    memory_bytes: int = 0


@dataclass(frozen=True)
class ScoreRequest:
    """A completion to score, with the row of its prompt."""

    completion: str
    row: Row


@dataclass(frozen=True)
class Scored:
    """Reward of a completion, with its parts by name if it has any; or the reason why there is none."""

    reward: float
    failure: str = ""
    parts: dict[str, float] = field(default_factory=dict)


class RewardWorker:
    """Handler of a reward process: `load` once, then `score`."""

    def __init__(self) -> None:
        self._reward: Callable[[str, Row], Any] | None = None
        self._name = ""
        self._memory_bytes = 0

    def handle(self, method: str, payload: bytes) -> bytes:
        if method == "load":
            self._load(wire.decode(LoadRequest, payload))
            return b""
        request = wire.decode(ScoreRequest, payload)
        return wire.encode(self._score(request.completion, request.row))

    def _load(self, request: LoadRequest) -> None:
        self._name, self._memory_bytes = request.reward, request.memory_bytes
        if request.memory_bytes:
            resource.setrlimit(resource.RLIMIT_DATA, (request.memory_bytes, request.memory_bytes))
        self._reward = resolve(self._name, kind="reward")

    def _score(self, completion: str, row: Row) -> Scored:
        """Score one completion.

        Raises:
            WorkerError: memory ran out; this process must be ended.
        """
        assert self._reward is not None, "score before load"
        try:
            reward = check_reward(self._reward(completion, row))
        except MemoryError:
            reward = None
        except BaseException as exc:  # sys.exit() too, since restarting a process takes a second
            return self._failed(f"raised {describe(exc)}", completion)
        if reward is None:  # checked outside the handler, where the memory that the call took is free again
            raise WorkerError(f"it took more memory than rollout.reward_memory_bytes = {self._memory_bytes}")
        if isinstance(reward, FailedReward):
            return self._failed(f"returned what cannot be trained on: {reward.reason}", completion)
        return Scored(float(reward), parts=reward.parts if isinstance(reward, NamedReward) else {})

    def _failed(self, how: str, completion: str) -> Scored:
        return Scored(math.nan, printable(f"the reward {self._name} {how} (completion {completion[:60]!r})", most=1000))
