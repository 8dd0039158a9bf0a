"""The reward process's handler, called in this process."""

import math
import re
from pathlib import Path

import pytest

from offbeat.data import wire
from offbeat.data.row import Row
from offbeat.errors import CodeError
from offbeat.rollout.reward_worker import RewardLoadRequest, RewardRequest, RewardWorker, ScoredCompletion
from offbeat.user_code.handshake import Handshake

REWARDS = Path(__file__).parents[1] / "support" / "rewards.py"


def loaded(name: str) -> RewardWorker:
    worker = RewardWorker()
    worker.handle("load", Handshake(wire.encode(RewardLoadRequest(f"{REWARDS}:{name}"))).pack())
    return worker


def score(worker: RewardWorker, completion: str) -> ScoredCompletion:
    return wire.decode(ScoredCompletion, worker.handle("score", wire.encode(RewardRequest(completion, Row("1>", "y")))))


def test_a_completion_is_scored() -> None:
    assert score(loaded("equal"), "y") == ScoredCompletion(1.0)
    assert score(loaded("equal"), "n") == ScoredCompletion(0.0)


def test_rewards_by_name_come_with_their_names() -> None:
    assert score(loaded("by_name"), "y") == ScoredCompletion(1.5, parts={"right": 1.0, "short": 0.5})
    assert "the reward 'short': nan is not a number" in score(loaded("by_name"), "").failure


def test_a_reward_that_raises_is_shown_with_the_completion() -> None:
    scored = score(loaded("raises_on_x"), "x")
    assert re.search(r"rewards.py:raises_on_x raised ValueError: x is no number at .*, line \d+ \(completion 'x'\)$", scored.failure)
    assert math.isnan(scored.reward)


@pytest.mark.parametrize(("name", "value"), [
    ("gives_text", "'good' (str) is not a number"), ("gives_nothing", "None (NoneType) is not a number"), ("gives_nan", "nan is not a"),
    ("gives_too_much", "1e+308 is not a number within ±1e+12"), ("gives_an_array", "array([1.]) (ndarray) is not a number"),
])
def test_a_reward_that_gives_no_number_to_train_on_says_what_it_gave(name: str, value: str) -> None:
    failure = score(loaded(name), "y").failure
    assert f"rewards.py:{name} returned what cannot be trained on: " in failure
    assert value in failure


@pytest.mark.parametrize(("name", "how"), [
    ("exits", "raised SystemExit: 3"), ("calls_itself", "raised RecursionError: maximum recursion depth exceeded"),
    ("says_what_no_file_takes", "raised ValueError: \\ud800yyy"),
])
def test_a_reward_that_raises_what_others_do_not_keeps_its_process_too(name: str, how: str) -> None:
    failure = score(loaded(name), "\ud7ff").failure
    assert f"rewards.py:{name} {how}" in failure
    assert len(failure) < 1100


def test_a_reward_that_is_not_there_is_refused() -> None:
    with pytest.raises(CodeError, match="has no function 'equals'; did you mean 'equal'"):
        RewardWorker().handle("load", Handshake(wire.encode(RewardLoadRequest(f"{REWARDS}:equals"))).pack())
