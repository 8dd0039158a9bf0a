"""Tasks of reasoning-gym with further tries: the model is told that an answer is wrong, and the last answer counts."""

import re
from typing import Any

import reasoning_gym

from offbeat.data.row import Row
from offbeat.user_code.boundary import Caught

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")


class ReasoningGym:
    """One item, drawn by the episode's seed."""

    def __init__(self, name: str, *, tries: int = 3, **options: Any) -> None:
        """`options` are the task's own."""
        self._name = name
        self._options = options
        self._tries_left = tries

    def reset(self, row: Row, seed: int) -> str:  # noqa: ARG002 - items come from the library
        self._data: Any = reasoning_gym.create_dataset(self._name, size=1, seed=seed, **self._options)
        self._item = self._data[0]
        return self._item["question"]

    def step(self, text: str) -> tuple[str, float, bool]:
        self._tries_left -= 1
        score = self._score_text(text)
        if score >= 1 or not self._tries_left:
            return "", score, True
        return "That is not right. Try again.", 0.0, False

    def _score_text(self, text: str) -> float:
        found = _ANSWER.findall(text) or _NUMBER.findall(text) or [text.strip()]
        with Caught():  # some tasks raise on text that is no answer of their kind
            return float(self._data.score_answer(found[-1].strip(), self._item))
        return 0.0
