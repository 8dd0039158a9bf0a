"""Unmodified agents of public libraries are evaluated against what a tenant of the service has, with nothing but an address and a key."""

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents_sdk.adder_model import QUESTION, RIGHT
from sdk.server import MODEL_NAME, Server

HERE, PYTHON = Path(__file__).parent, Path(__file__).parents[2] / ".venv-agents-a" / "bin" / "python"
PROGRAMS = {
    "openai": ["openai_chat.py"], "openai streamed": ["openai_chat.py", "--stream"],
    "openai-agents over Responses": ["openai_agents.py", "responses"], "anthropic": ["anthropic_messages.py"],
    "anthropic streamed": ["anthropic_messages.py", "--stream"]}
_BY_NAME = """
import sys
import anthropic, openai
path = sys.argv[1]
ask = {"model": path, "messages": [{"role": "user", "content": "What is 3 + 4?"}], "max_tokens": 8}
assert path in [model.id for model in openai.OpenAI().models.list()]
assert openai.OpenAI().chat.completions.create(**ask).usage.completion_tokens
assert anthropic.Anthropic().messages.create(**ask).usage.output_tokens
for other in (openai.OpenAI(api_key="tml-bob").chat.completions.create, anthropic.Anthropic(api_key="tml-bob").messages.create):
    try:
        other(**ask)
    except (openai.NotFoundError, anthropic.NotFoundError) as exc:
        assert "there is no model" in str(exc)
    else:
        raise AssertionError("another owner's weights were sampled")
"""


@pytest.fixture(scope="module")
def server(adder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(adder, tmp_path_factory.mktemp("server"), "--serve.aliases", '["policy"]') as running:
        yield running


def run(server: Server, *command: str) -> subprocess.CompletedProcess[str]:
    assert PYTHON.exists(), f"{PYTHON} does not exist; `make test-agents` installs it"
    environment = os.environ | {
        "OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "tml-alice", "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": "tml-alice", "OFFBEAT_MODEL": "policy",
        "OFFBEAT_ROW": json.dumps({"prompt": QUESTION, "answer": RIGHT})}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([str(PYTHON), *command], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("client", PROGRAMS)
def test_an_unmodified_agent_calls_its_tool_and_answers(client: str, server: Server) -> None:
    program, *arguments = PROGRAMS[client]
    # The model is wrong at times, on purpose.
    rewards = (float(run(server, str(HERE / "programs" / program), *arguments).stdout.split()[-1]) for _ in range(8))
    assert 1.0 in rewards


def test_clients_find_what_their_owner_has_trained_by_its_path(server: Server) -> None:
    def post(name: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"{server.url}/api/v1/{name}", json.dumps(body).encode(), {"x-api-key": "tml-alice", "content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    session = post("create_session", tags=[], sdk_version="0.38.0")["session_id"]
    made = post("create_model", session_id=session, model_seq_id=0, base_model=MODEL_NAME, lora_config={"rank": 4, "seed": 1})
    model = post("retrieve_future", request_id=made["request_id"])["model_id"]
    saved = post("save_weights_for_sampler", model_id=model, seq_id=1, path="one")
    path = post("retrieve_future", request_id=saved["request_id"])["path"]
    assert path.startswith("tinker://")
    run(server, "-c", _BY_NAME, path)
