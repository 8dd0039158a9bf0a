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
from image_models import make_folder, picture
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

_COMPLETIONS = """
import sys
import openai
client = openai.OpenAI(base_url=sys.argv[1], _strict_response_validation=True, max_retries=0)
ask = {"model": "policy", "max_tokens": 4, "temperature": 0}
# The SDK's types have no null in place of the first log-probability, which OpenAI tells as well.
two = openai.OpenAI(base_url=sys.argv[1], max_retries=0).completions.create(prompt=["What is", "3 + 4?"], n=2, logprobs=3, echo=True, **ask)
assert [choice.index for choice in two.choices] == [0, 1, 2, 3] and two.choices[2].text.startswith("3 + 4?")
first = two.choices[2].logprobs
assert first.token_logprobs[0] is None and all(value <= 0 for value in first.token_logprobs[1:])
assert len(first.tokens) == len(first.token_logprobs) == len(first.top_logprobs) == len(first.text_offset)
whole = client.completions.create(prompt="3 + 4?", **ask)
assert two.choices[2].text == "3 + 4?" + whole.choices[0].text and whole.usage.completion_tokens == 4
pieces = list(client.completions.create(prompt="3 + 4?", stream=True, stream_options={"include_usage": True}, **ask))
assert "".join(choice.text for piece in pieces for choice in piece.choices) == whole.choices[0].text
assert pieces[-1].usage.completion_tokens == 4
(stopped,) = client.completions.create(prompt="3 + 4?", stop=whole.choices[0].text[1], **ask).choices
assert stopped.text == whole.choices[0].text.partition(whole.choices[0].text[1])[0] and stopped.finish_reason == "stop"
chosen = client.completions.create(prompt="3 + 4?", extra_body={"structured_outputs": {"choice": ["ab"]}}, **ask)
assert chosen.choices[0].text == "ab"
for wrong in ({"suffix": "x"}, {"best_of": 2}, {"extra_body": {"no_such_field": 1}}):
    try:
        client.completions.create(prompt="x", **ask, **wrong)
    except openai.BadRequestError as exc:
        assert exc.param in (*wrong, "no_such_field"), exc
    else:
        raise AssertionError(wrong)
try:
    client.embeddings.create(model="policy", input="x")
except openai.NotFoundError as exc:
    assert exc.code == "not_found" and "this server has no POST" in exc.message, exc
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


@pytest.mark.parametrize("path", ["/v1", "/oai/api/v1"])
def test_completions_pass_the_sdks_strict_types(server: Server, path: str) -> None:
    run(server, "-c", _COMPLETIONS, server.url + path)


def test_pictures_are_read_alike_in_both_sdks_and_a_bad_one_is_one_sentence(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "smolvlm")
    picture().save(tmp_path / "a.png")
    with Server(folder, tmp_path, "--serve.aliases", '["policy"]') as running:
        done = run(running, str(HERE / "programs" / "images.py"), running.url, str(tmp_path / "a.png"), "tml-alice")
    counts, *refused = done.stdout.splitlines()
    assert len(set(counts.split())) == 1
    first, second, third = refused
    assert first == third and first.startswith("the chat: image 1 is no image in one of the formats")
    assert second.endswith("is the address 'https://example.org/a.png' (str), and nothing is fetched; send a data URI")
