"""The reward process's handler, called in this process."""

from pathlib import Path

import pytest

from offbeat.data import wire
from offbeat.data.row import Row
from offbeat.errors import CodeError
from offbeat.rollout.reward_worker import RewardWorker, ScoreRequest

REWARDS = Path(__file__).parents[1] / "support" / "rewards.py"


def loaded(name: str) -> RewardWorker:
    worker = RewardWorker()
    assert worker.handle("load", f"{REWARDS}:{name}".encode()) == b""
    return worker


def score(worker: RewardWorker, *completions: str) -> list[float]:
    return wire.decode(list[float], worker.handle("score", wire.encode(ScoreRequest(completions, Row("1>", "y")))))


def test_each_completion_is_scored() -> None:
    assert score(loaded("equal"), "y", "n", "y") == [1.0, 0.0, 1.0]
    assert score(loaded("equal")) == []


def test_a_reward_that_raises_is_shown_with_the_completion() -> None:
    with pytest.raises(CodeError, match=r"rewards.py:raises_on_x raised ValueError: x is no number \(completion 'x'\)"):
        score(loaded("raises_on_x"), "x")


def test_a_reward_that_gives_no_number_is_refused() -> None:
    with pytest.raises(CodeError, match="gives_text raised ValueError: could not convert string to float: 'good'"):
        score(loaded("gives_text"), "y")


def test_a_reward_that_is_not_there_is_refused() -> None:
    with pytest.raises(CodeError, match="has no function 'equals'; did you mean 'equal'"):
        RewardWorker().handle("load", f"{REWARDS}:equals".encode())
