"""What agents get and give."""

import json
from dataclasses import replace

import pytest

from offbeat.agents.task import AgentTask, Played, played, printed
from offbeat.data import wire
from offbeat.data.reward import FailedReward, NamedReward
from offbeat.data.row import Row
from offbeat.user_code.variables import environment_of_programs

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


def test_a_row_is_in_a_variable_up_to_what_linux_allows() -> None:
    around = len(json.dumps({"prompt": "", "answer": "", "solution": ""})) + len("OFFBEAT_ROW=") + 1
    for num_bytes, fits in (((128 << 10) - around, True), ((128 << 10) - around + 1, False)):
        assert ("OFFBEAT_ROW" in replace(TASK, row=Row("p" * num_bytes, "")).environment()) == fits


def test_programs_reach_the_proxy_directly_under_the_name_that_they_are_told() -> None:
    assert environment_of_programs({"A": "b"}, allowed=(), host="host.docker.internal") == {
        "A": "b", **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost,host.docker.internal")}


def test_rewards_are_numbers_or_mappings_or_left_to_the_run() -> None:
    assert played(None, of="f").outcome is None and played(True, of="f").outcome == 1.0
    named = played({"right": 1, "form": 0.5}, of="f").outcome
    assert isinstance(named, NamedReward) and named == 1.5
    failed = played(float("nan"), of="f").outcome
    assert isinstance(failed, FailedReward) and failed.reason.startswith("f returned nan (float), which is not a reward")


@pytest.mark.parametrize(("returned", "outcome"), [
    ({"reward": 1}, 1.0), ({"reward": {"right": 1, "form": 0.5}}, 1.5), ({"right": 1, "reward": 0.5}, 1.5), ({}, None)])
def test_metrics_stand_beside_rewards_and_are_none(returned: dict, outcome: float | None) -> None:
    metrics = {"steps": 3, "ok": True, "said": "x", "broken": float("inf"), 7: 1.0, "nested": {"a": 1}}
    expected = {"steps": 3.0, "ok": 1.0}
    assert (found := played({**returned, "metrics": metrics}, of="f")).metrics == expected and found.outcome == outcome
    text = json.dumps({**returned, "metrics": {"steps": 3, "ok": True, "said": "x"}})
    assert printed(f"hello\n{text}", of="c").metrics == expected
    assert played({"metrics": 2.0}, of="f").parts == {"metrics": 2.0}, "a reward of that name"
    assert wire.decode(Played, wire.encode(found)) == found


@pytest.mark.parametrize(("text", "outcome"), [
    ("hello\n0.5\n", 0.5), ('x\n{"reward": 1, "note": "y"}', 1.0), ('{"a": 1, "b": 2}', 3.0), ("", None), ("done", None), ("1\nbye", None),
    ("true", 1.0), ("false", 0.0), ('{"reward": true}', 1.0), ('{"reward": false, "note": "y"}', 0.0), ('{"reward": {"a": true}}', 1.0),
    ("null", None), ('{"reward": null}', None), ('"0.5"', None), ("[1]", None),
    ('{"reward": 2, "metrics": {"a": 1}}', 2.0), ('{"metrics": {"a": 1}}', None)])
def test_the_last_line_of_a_command_may_be_its_reward(text: str, outcome: float | None) -> None:
    assert printed(text, of="c").outcome == outcome


@pytest.mark.parametrize("value", ['"much"', "[1]", "NaN", '{"a": "x"}', "1e400", "{}"])
def test_what_a_command_prints_as_its_reward_and_is_none_is_told_and_not_replaced_by_another(value: str) -> None:
    outcome = printed(f'{{"reward": {value}}}', of="the command x").outcome
    assert isinstance(outcome, FailedReward) and outcome.reason.startswith("the command x returned")
