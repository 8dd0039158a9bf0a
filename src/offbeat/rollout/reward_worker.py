"""The reward process: loads one function by its dotted name and scores completions with it. Runs user code and nothing else of ours."""

from collections.abc import Callable
from dataclasses import dataclass

from offbeat.data import wire
from offbeat.data.row import Row
from offbeat.errors import CodeError
from offbeat.rollout.functions import resolve


@dataclass(frozen=True)
class ScoreRequest:
    """Completions of one prompt."""

    completions: tuple[str, ...]
    row: Row


class RewardWorker:
    """Handler of a reward child: `load` once, then `score`."""

    def __init__(self) -> None:
        self._reward: Callable[[str, Row], float] | None = None
        self._name = ""

    def handle(self, method: str, payload: bytes) -> bytes:
        if method == "load":
            self._name = payload.decode()
            self._reward = resolve(self._name, kind="reward")
            return b""
        request = wire.decode(ScoreRequest, payload)
        return wire.encode([self._score(completion, request.row) for completion in request.completions])

    def _score(self, completion: str, row: Row) -> float:
        assert self._reward is not None, "score before load"
        try:
            return float(self._reward(completion, row))
        except Exception as exc:
            raise CodeError(f"the reward {self._name} raised {type(exc).__name__}: {exc} (completion {completion[:60]!r})") from exc
