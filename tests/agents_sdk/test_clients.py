"""Every public client and agent library that was looked at is trained as it is: exact to the token, with calls of a tool."""

import json
import re
from pathlib import Path

import pytest

from agents_sdk.adder_model import CODE_TASK
from agents_sdk.conftest import TrainAgent
from agents_sdk.trained import Chain, Trained

RESULT = re.compile(r"<tool_response>\n7\n|Observation:\n7\b")
REPOSITORY, HERE = Path(__file__).parents[2], Path(__file__).parent
PROGRAMS = {
    "openai": ["openai_chat.py"],
    "openai streamed": ["openai_chat.py", "--stream"],
    "openai-agents over Responses": ["openai_agents.py", "responses"],
    "openai-agents over chat completions": ["openai_agents.py", "chat_completions"],
    "openai-agents with a tool over MCP": ["mcp_agent.py"],
    "pydantic-ai over Responses": ["pydantic_agent.py", "openai:policy"],
    "pydantic-ai over chat completions": ["pydantic_agent.py", "openai-chat:policy"],
    "pydantic-ai over Messages": ["pydantic_agent.py", "anthropic:policy"],
    "langgraph over chat completions": ["langgraph_agent.py", "chat_completions"],
    "langgraph over Responses": ["langgraph_agent.py", "responses"],
    "anthropic": ["anthropic_messages.py"],
    "anthropic streamed": ["anthropic_messages.py", "--stream"],
}
"""Clients that send all of their earlier messages again as they were."""


@pytest.mark.parametrize("client", PROGRAMS)
def test_a_client_that_appends_is_trained_on_one_sequence_per_episode(client: str, train_agent: TrainAgent) -> None:
    trained = train_agent(_command(".venv-agents-a", *PROGRAMS[client]))
    _check_numbers(trained)
    _check_one_chain_each(trained)
    _check_calls(trained)


def test_litellm_is_trained_on_one_sequence_per_episode(train_agent: TrainAgent) -> None:
    trained = train_agent(_command(".venv-agents-b", "litellm_agent.py"))
    _check_numbers(trained)
    _check_one_chain_each(trained)
    _check_calls(trained)


def test_an_agent_of_smolagents_that_calls_tools_is_trained_on_one_sequence_per_call(train_agent: TrainAgent) -> None:
    """It writes its own calls into later prompts as Python text."""
    trained = train_agent(_command(".venv-agents-a", "smolagents_agent.py", "tools"))
    _check_numbers(trained)
    _check_calls(trained)
    # What it could not read as a call it does send again as it was.
    assert any(len(chains) > 1 and len(chains[0]["turns"]) == 1 for chains in trained.episodes())


def test_an_agent_of_smolagents_that_writes_code_is_trained_on_one_sequence_per_episode(train_agent: TrainAgent) -> None:
    trained = train_agent(_command(".venv-agents-a", "smolagents_agent.py", "code"), question=CODE_TASK)
    _check_numbers(trained)
    _check_one_chain_each(trained)
    assert "final_answer(add(3, 4))" in "".join(
        trained.text(chain, sampled=True) for chains in trained.episodes() for chain in chains)


def test_two_agents_of_camel_are_trained_on_one_sequence_each_per_episode(train_agent: TrainAgent) -> None:
    trained = train_agent({"agent.command": json.dumps([
        str(_python(".venv-agents-camel")), str(REPOSITORY / "examples" / "camel_agents.py")])})
    _check_numbers(trained)
    for chains in trained.episodes():
        assert len(chains) == 2 and len({chain["reward"] for chain in chains}) == 1
        teacher, solver = sorted(chains, key=lambda chain: "RULES OF ASSISTANT" in trained.text(chain, sampled=False))
        assert "RULES OF USER" in trained.text(teacher, sampled=False)
        assert len(teacher["turns"]) == len(solver["turns"]) == 2


@pytest.mark.parametrize(("venv", "environment", "harness"), [
    (".venv-verifiers", "adder", "adder"), (".venv-verifiers-old", "adder_classic", "")])
def test_an_environment_of_verifiers_is_trained_on_one_sequence_per_episode(
    venv: str, environment: str, harness: str, train_agent: TrainAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HERE / "verifiers")  # where the module is looked for
    options = [f"harness={harness}"] if harness else []
    trained = train_agent({
        "agent.environment": f"verifiers:{environment}", "agent.options": json.dumps(options), "agent.python": str(_python(venv))})
    _check_numbers(trained)
    _check_one_chain_each(trained)
    _check_calls(trained)


def _command(venv: str, program: str, *arguments: str) -> dict[str, str]:
    return {"agent.command": json.dumps([str(_python(venv)), str(HERE / "programs" / program), *arguments])}


def _python(venv: str) -> Path:
    python = REPOSITORY / venv / "bin" / "python"
    assert python.exists(), f"{python} does not exist; `make test-agents` installs it"
    return python


def _check_numbers(trained: Trained) -> None:
    """Both steps trained on all that was sampled, none of it stale, and the trainer's log-probabilities were those of the engine."""
    steps = trained.run.metrics()
    assert [row["global_step"] for row in steps] == [1, 2]
    for row in steps:
        chains = trained.chains(row["global_step"])
        assert row["train/tokens"] == sum(sum(chain["loss_mask"]) for chain in chains)
        assert row["policy/logprob_gap_max"] < 1e-4
        for chain in chains:
            sampled = [version for version, mask in zip(chain["versions"], chain["loss_mask"], strict=True) if mask]
            assert set(sampled) == {row["global_step"] - 1}
            ends = [turn["end"] for turn in chain["turns"]]
            assert ends == sorted(set(ends)) and ends[-1] == len(chain["tokens"]), ends


def _check_one_chain_each(trained: Trained) -> None:
    assert [len(chains) for chains in trained.episodes()] == [1] * 4


def _check_calls(trained: Trained) -> None:
    """In some episode the model called the tool, was given its result, and answered right. A call that is forced begins before the name."""
    assert any(
        max(chain["reward"] for chain in chains) == 1.0 and sum(len(chain["turns"]) for chain in chains) > 1
        and 'add", "arguments": {' in _texts(trained, chains, sampled=True)
        and RESULT.search(_texts(trained, chains, sampled=False))
        for chains in trained.episodes())


def _texts(trained: Trained, chains: list[Chain], *, sampled: bool) -> str:
    return "\n".join(trained.text(chain, sampled=sampled) for chain in chains)
