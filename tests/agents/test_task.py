"""What agents get and give."""

import json

import pytest

from offbeat.agents.task import AgentTask, Played, played, printed
from offbeat.data import wire
from offbeat.data.reward import FailedReward, NamedReward
from offbeat.data.row import Row

TASK = AgentTask(Row(({"role": "user", "content": "hi"},), "7", {"level": "2"}), "http://h/v1", "http://h", "sk-1", "policy", 5, 60.0)


def test_tasks_and_rewards_cross_processes() -> None:
    assert wire.decode(AgentTask, wire.encode(TASK)) == TASK
    assert wire.decode(Played, wire.encode(Played(1.5, {"a": 1.5}))) == Played(1.5, {"a": 1.5})


def test_a_command_finds_all_in_variables() -> None:
    environment = TASK.environment()
    assert environment["OPENAI_BASE_URL"] == "http://h/v1" and environment["ANTHROPIC_BASE_URL"] == "http://h"
    assert environment["OPENAI_API_KEY"] == environment["ANTHROPIC_API_KEY"] == "sk-1"
    assert json.loads(environment["OFFBEAT_ROW"]) == {
        "prompt": [{"role": "user", "content": "hi"}], "answer": "7", "solution": "", "level": "2"}


def test_rewards_are_numbers_or_mappings_or_left_to_the_run() -> None:
    assert played(None, of="f").outcome is None and played(True, of="f").outcome == 1.0
    named = played({"right": 1, "form": 0.5}, of="f").outcome
    assert isinstance(named, NamedReward) and named == 1.5
    failed = played(float("nan"), of="f").outcome
    assert isinstance(failed, FailedReward) and failed.reason.startswith("f returned nan (float), which is no reward")


@pytest.mark.parametrize(("text", "outcome"), [
    ("hello\n0.5\n", 0.5), ('x\n{"reward": 1, "note": "y"}', 1.0), ('{"a": 1, "b": 2}', 3.0), ("", None), ("done", None), ("true", None),
    ('{"reward": "much"}', None), ("1\nbye", None)])
def test_the_last_line_of_a_command_may_be_its_reward(text: str, outcome: float | None) -> None:
    assert printed(text, of="c").outcome == outcome
