"""Completions over HTTP, on a real engine: what `asample` tells of the same prompts, in OpenAI's form."""

import asyncio
from typing import Any

import numpy as np
import pytest

from field_requests import BASES, field_requests
from http_serving import Client, Serve
from protocol import finished, sample_body, session_of

PROMPT, OTHER = [13, 14, 15, 9], [14, 9]
PATH = "/v1/completions"


async def ask(client: Client, *, path: str = PATH, **body: Any) -> Any:
    answer = await client.ask("POST", path, {"model": "org/small", "temperature": 0, "max_tokens": 6} | body)
    assert answer.status == 200, answer.body
    return answer.json


async def sampled(client: Client, prompt: list[int], **more: Any) -> Any:
    """What asample says."""
    session = await session_of(client)
    sampler = (await client.post("create_sampling_session", {
        "session_id": session, "sampling_session_seq_id": 1, "base_model": "org/small"})).json["sampling_session_id"]
    body = sample_body(sampler, 0, prompt, max_tokens=6, temperature=0) | more
    return await finished(client, await client.post("asample", body))


def test_tokens_and_log_probabilities_are_those_of_asample(serve: Serve) -> None:
    async def body(client: Client) -> None:
        told = await ask(client, prompt=[PROMPT, OTHER], n=2, logprobs=2, echo=True, return_token_ids=True, prompt_logprobs=1)
        assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3] and told["model"] == "org/small"
        for prompt, choices in ((PROMPT, told["choices"][:2]), (OTHER, told["choices"][2:])):
            expected = await sampled(client, prompt, prompt_logprobs=True)
            (sequence,) = expected["sequences"]
            tokens, logprobs = (np.frombuffer(sequence[name], dtype) for name, dtype in (("tokens", "<i4"), ("logprobs", "<f4")))
            scores = np.frombuffer(expected["prompt_logprobs"], "<f4")
            for choice in choices:
                assert choice["token_ids"] == tokens.tolist()
                first, *values = choice["logprobs"]["token_logprobs"]
                np.testing.assert_allclose(values, [*scores[1:], *logprobs], atol=1e-5)
                assert first is None and choice["logprobs"]["top_logprobs"][0] is None
                assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [2] * (len(values))
                assert "".join(choice["logprobs"]["tokens"][: -1]) in choice["text"] + "<eos>"
                assert choice["prompt_logprobs"][1][str(prompt[1])]["logprob"] == pytest.approx(float(scores[1]), abs=1e-5)
        assert told["usage"]["prompt_tokens"] == 6

    serve(body)


def test_text_is_continued_as_its_tokens_are_at_both_paths_and_streams_are_the_same_text(serve: Serve) -> None:
    async def body(client: Client) -> None:
        text = (await ask(client, prompt=PROMPT, echo=True, max_tokens=0))["choices"][0]["text"]
        of_ids, of_text, theirs = await asyncio.gather(
            ask(client, prompt=PROMPT), ask(client, prompt=text), ask(client, prompt=text, path="/oai/api" + PATH))
        assert of_ids["choices"] == of_text["choices"] == theirs["choices"] and of_ids["usage"]["completion_tokens"] > 0
        streamed = await client.ask("POST", PATH, {
            "model": "org/small", "prompt": text, "temperature": 0, "max_tokens": 6, "stream": True,
            "stream_options": {"include_usage": True}})
        assert streamed.headers["content-type"] == "text/event-stream" and streamed.body.endswith(b"data: [DONE]\n\n")
        assert of_ids["choices"][0]["text"].encode() in streamed.body and b'"total_tokens"' in streamed.body
        whole = of_ids["choices"][0]["text"]
        stopped = await ask(client, prompt=text, stop=whole[1])
        assert stopped["choices"][0]["text"] == whole[: whole.index(whole[1])] and stopped["choices"][0]["finish_reason"] == "stop"

    serve(body)


def test_settings_that_shape_samples_act(serve: Serve) -> None:
    async def body(client: Client) -> None:
        async def text(**more: Any) -> str:
            return (await ask(client, prompt=PROMPT, **more))["choices"][0]["text"]

        (first,) = (await ask(client, prompt=PROMPT, max_tokens=1, return_token_ids=True))["choices"][0]["token_ids"]
        banned = await ask(client, prompt=PROMPT, max_tokens=1, return_token_ids=True, logit_bias={str(first): -100})
        assert banned["choices"][0]["token_ids"] != [first]
        assert await text(structured_outputs={"choice": ["201"]}) == "201"
        assert await text(structured_outputs={"regex": "[34]{3}"}, temperature=1, max_tokens=9) in [
            a + b + c for a in "34" for b in "34" for c in "34"]
        assert len((await ask(
            client, prompt=PROMPT, ignore_eos=True, max_tokens=9, return_token_ids=True))["choices"][0]["token_ids"]) == 9
        chat = await client.ask("POST", "/v1/chat/completions", {
            "model": "org/small", "messages": [{"role": "user", "content": "12"}], "logprobs": True, "top_logprobs": 3, "max_tokens": 9,
            "structured_outputs": {"choice": ["12"]}})
        (choice,) = chat.json["choices"]
        assert choice["message"]["content"] == "12" and len(choice["logprobs"]["content"][0]["top_logprobs"]) == 3

    serve(body)


@pytest.mark.parametrize(("change", "status", "told"), [
    ({"prompt": []}, 422, "prompt must have 1 to"), ({"prompt": [[1], 2]}, 400, "prompt mixes token ids with prompts"),
    ({"prompt": [10**6]}, 422, "prompt must hold token ids"), ({"prompt": [1] * 10**5}, 422, "prompt must have 1 to"),
    ({"prompt": ["1"] * 257}, 400, "prompt takes 1 to 256 prompts here, got 257"), ({"n": 0}, 422, "n must be"),
    ({"max_tokens": 0}, 422, "max_tokens must be"), ({"logprobs": 999}, 422, "top_logprobs must be"),
    ({"prompt_logprobs": 21}, 400, "must be 0 to 20"), ({"min_p": 2}, 400, "min_p must be 0 to 1"),
    ({"suffix": "x"}, 400, "suffix is not honoured by this service"), ({"model": "other"}, 404, "there is no model 'other' here"),
    ({"logit_bias": {"999999": 1}}, 400, "logit_bias has token 999999"),
    ({"structured_outputs": {"grammar": "no grammar"}}, 400, "grammar"),
])
def test_what_cannot_be_done_is_one_sentence_in_an_error_object(serve: Serve, change: dict[str, Any], status: int, told: str) -> None:
    async def body(client: Client) -> None:
        answer = await client.ask("POST", PATH, {"model": "org/small", "prompt": PROMPT, "max_tokens": 2} | change)
        assert answer.status == status and told in answer.json["error"]["message"], answer.body
        assert "\n" not in answer.json["error"]["message"] and answer.json["error"]["type"] == "invalid_request_error"

    serve(body)


def test_unknown_paths_below_those_of_the_vendors_answer_in_their_form(serve: Serve) -> None:
    async def body(client: Client) -> None:
        for path in ("/v1/embeddings", "/oai/api/v1/embeddings", "/anthropic/api/v1/complete"):
            answer = await client.ask("POST", path, {})
            assert answer.status == 404 and f"no POST {path}" in answer.json["error"]["message"]
            assert ("type" in answer.json) == path.startswith("/anthropic")
        answer = await client.ask("GET", "/oai/api" + PATH)
        assert answer.status == 405 and answer.json["error"]["code"] == "method_not_allowed"
        assert "detail" in (await client.ask("POST", "/api/v1/no_such", {})).json

    serve(body)


def test_every_field_acts_or_is_refused_or_harmless_as_the_table_says(serve: Serve) -> None:
    async def body(client: Client) -> None:
        tried = 0
        for path, asked, name, status in field_requests("service"):
            if name in ("tools", "model") and status == 200:
                continue  # tools do not fit into this model's context; test_routes_chat calls some
            answer = await client.ask("POST", path, {"model": "org/small", **asked})
            assert answer.status == status, (path, name, answer.body)
            if status == 400:
                error = answer.json["error"]
                assert name in error["message"] and (path == "/v1/messages" or error["param"].partition("[")[0] == name)
            tried += 1
        assert tried > 300 and {path for path, _ in BASES.values()} == {path for path, *_ in field_requests("service")}

    serve(body)
