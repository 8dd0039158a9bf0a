"""What is said to an engine and how its answers are read; `test_client.py` says it to a real one."""

from typing import Any

import pytest

from offbeat.errors import EngineError
from offbeat.inference.dialects import EmbeddedDialect, Sample, Sampling

DIALECT = EmbeddedDialect()


def choice(**changes: Any) -> dict[str, Any]:
    return {
        "token_ids": [4, 5, 0], "logprobs": {"token_logprobs": [-0.1, -0.2, -0.3]}, "versions": [2, 2, 3], "text": "ab",
        "finish_reason": "stop"} | changes


def test_a_request_carries_the_sampling() -> None:
    request = DIALECT.generate((1, 2), Sampling(7, temperature=0.5, top_p=0.9, top_k=3), n=4)
    assert (request.method, request.path) == ("POST", "/v1/completions")
    assert request.body == {
        "prompt": (1, 2), "n": 4, "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "logprobs": 0, "return_token_ids": True}
    body = DIALECT.generate((1,), Sampling(7, stop=("\n",), seed=0), n=1).body
    assert body is not None
    assert (body["stop"], body["seed"]) == (("\n",), 0)


def test_an_answer_becomes_samples() -> None:
    samples = DIALECT.samples({"choices": [choice(), choice(text="c", finish_reason="length")]})
    assert samples[0] == Sample((4, 5, 0), (-0.1, -0.2, -0.3), (2, 2, 3), "ab", "stop")
    assert samples[1].finish_reason == "length"


@pytest.mark.parametrize(("changes", "reason"), [
    ({"versions": [2, 2]}, "3 tokens with 3 log-probabilities and 2 versions"),
    ({"logprobs": {"token_logprobs": []}}, "3 tokens with 0 log-probabilities and 3 versions"),
    ({"finish_reason": "abort"}, "ended a sample with 'abort'"),
])
def test_an_answer_that_cannot_be_trained_on_is_an_error_of_the_engine(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        DIALECT.samples({"choices": [choice(**changes)]})
