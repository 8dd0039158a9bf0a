"""The reward process: loads one function by its dotted name and scores completions with it. Runs user code and nothing else of ours.

It sets its own limit of memory before any user code runs. A call that exceeds it ends the process, for nobody knows what is left behind.
"""

import math
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offbeat.data import wire
from offbeat.data.reward import FailedReward, check_reward
from offbeat.data.row import Row
from offbeat.errors import WorkerError, describe, printable
from offbeat.rollout.functions import resolve


@dataclass(frozen=True)
class LoadRequest:
    """The name of a reward, and the memory that its process may take; 0 for any."""

    reward: str
    memory_bytes: int = 0


@dataclass(frozen=True)
class ScoreRequest:
    """A completion of a prompt."""

    completion: str
    row: Row


@dataclass(frozen=True)
class Scored:
    """Its reward, or why there is none."""

    reward: float
    failure: str = ""


class RewardWorker:
    """Handler of a reward child: `load` once, then `score`."""

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
        """
        Raises:
            WorkerError: there was not enough memory; this process is to be ended.
        """
        assert self._reward is not None, "score before load"
        try:
            reward = check_reward(self._reward(completion, row))
        except MemoryError:
            reward = None
        except BaseException as exc:  # sys.exit(), too: a process costs a second
            return self._failed(f"raised {describe(exc)}", completion)
        if reward is None:  # out of the handler, where what the call has taken is free again
            raise WorkerError(f"it took more memory than rollout.reward_memory_bytes = {self._memory_bytes}")
        if isinstance(reward, FailedReward):
            return self._failed(f"returned what cannot be trained on: {reward.reason}", completion)
        return Scored(reward)

    def _failed(self, how: str, completion: str) -> Scored:
        return Scored(math.nan, printable(f"the reward {self._name} {how} (completion {completion[:60]!r})", most=1000))
