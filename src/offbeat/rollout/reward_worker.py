"""The reward process: loads one function by its dotted name and scores completions with it. Runs user code and nothing else of ours."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offbeat.data import wire
from offbeat.data.reward import FailedReward, check_reward
from offbeat.data.row import Row
from offbeat.errors import describe, printable
from offbeat.rollout.functions import resolve


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

    def handle(self, method: str, payload: bytes) -> bytes:
        if method == "load":
            self._name = payload.decode()
            self._reward = resolve(self._name, kind="reward")
            return b""
        request = wire.decode(ScoreRequest, payload)
        return wire.encode(self._score(request.completion, request.row))

    def _score(self, completion: str, row: Row) -> Scored:
        assert self._reward is not None, "score before load"
        try:
            reward = check_reward(self._reward(completion, row))
        except BaseException as exc:  # sys.exit(), too: a process costs a second
            return self._failed(f"raised {describe(exc)}", completion)
        if isinstance(reward, FailedReward):
            return self._failed(f"returned what cannot be trained on: {reward.reason}", completion)
        return Scored(reward)

    def _failed(self, how: str, completion: str) -> Scored:
        return Scored(math.nan, printable(f"the reward {self._name} {how} (completion {completion[:60]!r})", most=1000))
