"""What is said to the embedded engine and how its answers are read; `test_client.py` says it to a real one."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from drawn_supports import as_supports
from offbeat.data.sample_supports import BITS, KEPT, pack_supports
from offbeat.errors import EngineError
from offbeat.inference.dialects.embedded import EmbeddedDialect
from offbeat.inference.sampling import Draws, PromptScore, Sample, Sampling, ScoreRequest
from offbeat.inference.seeds import seed_from
from offbeat.weights.protocol import Proof


class OneAnswer:
    """A wire that gives one answer and keeps what it was asked."""

    name = "engine 0"

    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    async def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        self.asked.append((method, path, body))
        return self.answer

    async def fetch(self, path: str, body: Any, read: Callable[[bytes], Any]) -> Any:
        return read(msgspec.json.encode(await self.call("POST", path, body)))


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
        "prompt": (1, 2), "n": 4, "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "logprobs": 0, "return_token_ids": True,
        "encoding_format": "base64"})
    sampling = Sampling(
        7, top_k=3, stop=("\n",), seed=0, stop_token_ids=(4,), ignore_eos=True, scaled_logprobs=True, top_logprobs=2)
    _, (_, _, body) = generate({"choices": []}, sampling, adapter="alice@3")
    assert (body["stop"], body["seed"], body["model"]) == (("\n",), 0, "alice@3")
    assert (body["stop_token_ids"], body["ignore_eos"], body["scaled_logprobs"], body["logprobs"]) == ((4,), True, True, 2)
    _, (_, _, rest) = generate({"choices": []}, replace(sampling, first_sample=32))
    assert rest["seed"] == seed_from(0, 32) != 32, "the keys of its samples are those that the whole would have had"
    _, (_, _, body) = generate({"choices": []}, replace(sampling, top_k=0))
    assert "scaled_logprobs" not in body  # it would be no difference


def test_supports_are_asked_for_where_something_leaves_tokens_out_and_must_have_the_tokens() -> None:
    given = as_supports(np.arange(9)[None] == [[4], [5], [0]], [KEPT, BITS, KEPT])
    answer = {"choices": [choice(supports=pack_supports(given))]}
    [sample], (_, _, body) = generate(answer, Sampling(7, top_k=3, supports=True))
    assert body["return_supports"] and sample.supports is not None and sample.supports.words.tolist() == given.words.tolist()
    [sample], (_, _, body) = generate({"choices": [choice()]}, Sampling(7, supports=True))
    assert "return_supports" not in body and sample.supports is None
    two, swapped = given.at_indices(np.array([0, 1])), given.at_indices(np.array([1, 0, 2]))
    for told, wrong in ((None, "none"), (two, "2"), (swapped, "one without its token")):
        with pytest.raises(EngineError, match=f"asked for the supports of 3 tokens and gave {wrong}; set model.support_replay to"):
            generate({"choices": [choice(supports=told and pack_supports(told))]}, Sampling(7, top_k=3, supports=True))


def test_an_answer_becomes_samples() -> None:
    samples, _ = generate({"choices": [choice(), choice(text="c", finish_reason="length")]})
    assert (samples[0].token_ids, samples[0].versions, samples[0].text) == ((4, 5, 0), (2, 2, 3), "ab")
    assert samples[0].logprobs == pytest.approx((-0.1, -0.2, -0.3)) and samples[0].finish_reason == "stop"
    assert samples[1].finish_reason == "length"


def test_the_likeliest_tokens_are_as_many_as_asked_for_without_what_cannot_be_drawn() -> None:
    rows = [{"token_id:9": -3.0, "token_id:4": -0.5, "token_id:5": -1.0}, {"token_id:5": 0.0, "token_id:6": -9999.0}, {}]
    told = choice(logprobs={"token_logprobs": [-0.1, -0.2, -0.3], "top_logprobs": rows})
    (sample,), _ = generate({"choices": [told]}, Sampling(7, top_logprobs=2))
    assert sample.top_logprobs == (((4, -0.5), (5, -1.0)), ((5, 0.0),), ())
    (sample,), _ = generate({"choices": [told]})
    assert sample.top_logprobs == ()


def score(answer: dict[str, Any], request: ScoreRequest, *, adapter: str = "") -> tuple[PromptScore, Any]:
    wire = OneAnswer(answer)
    return asyncio.run(EmbeddedDialect().score(wire, request, adapter=adapter)), wire.asked[0]


def test_a_score_is_asked_for_and_read() -> None:
    found, asked = score({"version": 4, "logprobs": [-0.5]}, ScoreRequest((1, 2)))
    assert asked == ("POST", "/v1/score", {"tokens": (1, 2), "top_k": 0})
    assert math.isnan(found.logprobs[0]) and (found.logprobs[1:], found.version, found.top, found.target_logprobs) == ((-0.5,), 4, (), ())
    answer = {"version": 4, "logprobs": [-0.5], "top_logprobs": [[[2, -0.5]]], "target_logprobs": [[-1.0, -2.0]]}
    found, (_, _, body) = score(answer, ScoreRequest((1, 2), 1, ((3,), (3, 4))), adapter="alice@12")
    assert (body["adapter"], body["top_k"], body["targets"]) == ("alice@12", 1, ((3,), (3, 4)))
    assert (found.version, found.top, found.target_logprobs[1]) == (12, ((), ((2, -0.5),)), (-1.0, -2.0))
    assert len(found.target_logprobs[0]) == 1 and math.isnan(found.target_logprobs[0][0])
    with pytest.raises(EngineError, match="an engine scored 3 of 2 tokens"):
        score({"version": 4, "logprobs": [-0.5, -0.5]}, ScoreRequest((1, 2)))


def test_tokens_to_draw_are_asked_for_and_read() -> None:
    answer = {"version": 4, "logprobs": [-0.5], "draws": [[[7, -2.0], [7, -2.0]]]}
    found, (_, _, body) = score(answer, ScoreRequest((1, 2), draws=Draws(2, 0.7, 11)))
    assert (body["draws"], body["temperature"], body["seed"]) == (2, 0.7, 11) and found.draws == ((), ((7, -2.0), (7, -2.0)))
    with pytest.raises(EngineError, match="an engine scored"):
        score(answer | {"draws": []}, ScoreRequest((1, 2), draws=Draws(2, 0.7, 11)))


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


@pytest.mark.parametrize("adapter", ["", "alice@12"])
def test_a_proof_is_one_request(adapter: str) -> None:
    wire = OneAnswer({"version": 4, "fingerprint": "f", "logprobs": [-0.5]})
    proof = asyncio.run(EmbeddedDialect().prove(wire, (1, 2), adapter=adapter))
    assert proof == Proof(12 if adapter else 4, "f", (-0.5,))
    assert wire.asked == [("POST", "/v1/weights/prove", {"tokens": (1, 2)} | ({"adapter": adapter} if adapter else {}))]
