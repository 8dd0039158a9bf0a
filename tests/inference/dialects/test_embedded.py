"""What is said to the embedded engine and how its answers are read; `test_client.py` says it to a real one."""

import asyncio
from typing import Any

import pytest

from offbeat.errors import EngineError
from offbeat.inference.dialects.embedded import EmbeddedDialect
from offbeat.inference.sampling import Sample, Sampling


class OneAnswer:
    """A wire that gives one answer and keeps what it was asked."""

    name = "engine 0"

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    async def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        self.asked.append((method, path, body))
        return self.answer


def choice(**changes: Any) -> dict[str, Any]:
    return {
        "token_ids": [4, 5, 0], "logprobs": {"token_logprobs": [-0.1, -0.2, -0.3]}, "versions": [2, 2, 3], "text": "ab",
        "finish_reason": "stop"} | changes


def generate(answer: dict[str, Any], sampling: Sampling | None = None, *, adapter: str = "") -> tuple[list[Sample], Any]:
    wire = OneAnswer(answer)
    samples = asyncio.run(EmbeddedDialect().generate(wire, (1, 2), sampling or Sampling(7), n=4, adapter=adapter))
    return samples, wire.asked[0]


def test_a_request_carries_the_sampling() -> None:
    _, asked = generate({"choices": []}, Sampling(7, temperature=0.5, top_p=0.9, top_k=3))
    assert asked == ("POST", "/v1/completions", {
        "prompt": (1, 2), "n": 4, "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "logprobs": 0, "return_token_ids": True})
    _, (_, _, body) = generate({"choices": []}, Sampling(7, stop=("\n",), seed=0), adapter="alice@3")
    assert (body["stop"], body["seed"], body["model"]) == (("\n",), 0, "alice@3")


def test_an_answer_becomes_samples() -> None:
    samples, _ = generate({"choices": [choice(), choice(text="c", finish_reason="length")]})
    assert samples[0] == Sample((4, 5, 0), (-0.1, -0.2, -0.3), (2, 2, 3), "ab", "stop")
    assert samples[1].finish_reason == "length"


def test_tokens_of_an_adapter_carry_the_adapters_version() -> None:
    (sample,), _ = generate({"choices": [choice()]}, adapter="alice@12")
    assert sample.versions == (12, 12, 12)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"versions": [2, 2]}, "3 tokens with 3 log-probabilities and 2 versions"),
    ({"logprobs": {"token_logprobs": []}}, "3 tokens with 0 log-probabilities and 3 versions"),
    ({"finish_reason": "abort"}, "ended a sample with 'abort'"),
])
def test_an_answer_that_cannot_be_trained_on_is_an_error_of_the_engine(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        generate({"choices": [choice(**changes)]})


class Checked(OneAnswer):
    """A wire of an engine that serves the model "small", and adapters of rank 8 at most."""

    async def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        return {"/health": {"version": 0, "max_adapter_rank": 8}, "/v1/models": {"data": [{"id": "small"}, {"id": "alice@3"}]}}[path]


def test_an_engine_of_the_wanted_model_and_rank_passes() -> None:
    for dialect in (EmbeddedDialect(), EmbeddedDialect(model="/models/small"), EmbeddedDialect(model="small", lora_rank=8)):
        asyncio.run(dialect.check(Checked({})))


@pytest.mark.parametrize(("dialect", "reason"), [
    (EmbeddedDialect(model="runs/large"), "serves 'small', 'alice@3' instead of 'runs/large'; start it on that model, or set model.path"),
    (EmbeddedDialect(model="small", lora_rank=9), "takes adapters of rank <= 8 and model.lora.rank is 9; start it with --max-"),
])
def test_an_engine_of_another_model_or_a_smaller_rank_is_refused(dialect: EmbeddedDialect, reason: str) -> None:
    with pytest.raises(EngineError, match=f"engine 0 {reason}"):
        asyncio.run(dialect.check(Checked({})))
