"""[agent]: bounds, and which workflow plays what."""

import pytest
from pydantic import ValidationError

from offbeat.config.agent import AgentConfig
from offbeat.config.root import Config


@pytest.mark.parametrize("values", [{"max_turns": 0}, {"timeout_s": 0}, {"processes": 0}, {"episodes_per_process": 0}, {"model": ""}])
def test_values_without_meaning_are_refused(values):
    with pytest.raises(ValidationError):
        AgentConfig(**values)


@pytest.mark.parametrize(("workflow", "agent"), [
    ("agent", {"program": "a.py:run"}), ("agent", {"command": ["python", "a.py"]}),
    ("agent", {"environment": "verifiers:x", "python": "/venv/bin/python"}), ("gym", {"environment": "textarena:TicTacToe-v0"}),
    ("tool_loop", {"tools": ["a.py:add", "mcp:python server.py"]}), ("single_turn", {}), ("my.py:workflow", {})])
def test_each_workflow_plays_its_own(workflow, agent):
    Config.model_validate({"rollout": {"workflow": workflow}, "agent": agent})


@pytest.mark.parametrize(("workflow", "agent", "sentence"), [
    ("single_turn", {"tools": ["a.py:add"]},
     r"agent.tools must be empty with rollout.workflow = 'single_turn', got \('a.py:add',\); it is for 'tool_loop'"),
    ("agent", {}, "one of agent.program, agent.command, agent.environment must be given with rollout.workflow = 'agent', got none"),
    ("agent", {"program": "a.py:run", "command": ["a"]}, "got program and command"),
    ("gym", {"environment": "verifiers:x"}, "rollout.workflow must be 'agent' with agent.environment = 'verifiers:x', got 'gym'"),
    ("agent", {"environment": "gem:x"}, "rollout.workflow must be 'gym' with agent.environment = 'gem:x', got 'agent'"),
    ("agent", {"program": "a.py:run", "timeout_s": 600}, "rollout.episode_timeout_s must be above agent.timeout_s = 600, got 600"),
    ("agent", {"program": "a.py:run", "host": "0.0.0.0"}, "agent.told_host must be given with agent.host = '0.0.0.0', which is every"),
    ("agent", {"program": "a.py:run", "python": "/p"}, "agent.python must be empty without an environment that brings its own loop")])
def test_what_contradicts_itself_is_refused(workflow, agent, sentence):
    with pytest.raises(ValidationError, match=sentence):
        Config.model_validate({"rollout": {"workflow": workflow}, "agent": agent})
