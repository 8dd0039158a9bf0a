"""Bodies become sampling parameters as OpenAI and vLLM mean them."""

import json

import pytest

from offbeat.chat.dialects import read_body
from offbeat.chat.fields import FIELDS
from offbeat.chat.messages import ChatRequest
from offbeat.chat.shaping import Shaping, Structure
from offbeat.engine.request import SamplingParams
from offbeat.engine.wire import CompletionBody, SwitchBody, body_of, read_completion
from offbeat.errors import RefusedError

SHAPING = Shaping(min_p=0.25, logit_bias=((3, 1.0), (7, -2.0)), structure=Structure.of_choices(["a", "b"]))


def test_defaults_are_openais():
    body = read_completion(b'{"prompt": "a", "model": "anything", "user": "x"}')
    assert body.params(default_max_tokens=16) == SamplingParams(max_new_tokens=16)
    assert not body.wants_logprobs and not body.stream and body.model == "anything"


def test_every_field_arrives():
    data = b"""{"prompt": [1, 2], "n": 3, "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 11, "stop": ["a", "b"],
        "stop_token_ids": [5], "ignore_eos": true, "logprobs": 6, "scaled_logprobs": true, "return_token_ids": true, "stream": true}"""
    body = read_completion(data)
    assert body.prompt == [1, 2] and body.n == 3 and body.wants_logprobs and body.return_token_ids and body.stream
    assert body.params(default_max_tokens=16) == SamplingParams(
        max_new_tokens=4, temperature=0.5, top_p=0.9, top_k=7, seed=11, stop=("a", "b"), stop_token_ids=(5,), ignore_eos=True,
        scaled_logprobs=True, top_logprobs=6,
    )


@pytest.mark.parametrize(("prompt", "prompts"), [
    ("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1, 2], [3]], [[1, 2], [3]]), ([[1], "b"], [[1], "b"]), ([], [[]])])
def test_a_prompt_is_one_or_a_list_of_them(prompt, prompts):
    assert CompletionBody(prompt=prompt).prompts == prompts


def test_token_ids_and_prompts_are_not_mixed():
    with pytest.raises(RefusedError, match="prompt mixes token ids with prompts"):
        CompletionBody(prompt=[1, "a"]).prompts  # noqa: B018
    with pytest.raises(RefusedError, match=r"\$\.prompt.*prompt takes a string, a list of token ids, or a list of such prompts"):
        read_completion(b'{"prompt": [[1, "a"]]}')


def test_null_means_left_out_in_every_field():
    fields = {name: None for name in FIELDS["completions"] if name not in ("prompt", "stream_options.include_usage")}
    assert read_completion(json.dumps({**fields, "prompt": "a"}).encode()) == CompletionBody(prompt="a")
    assert not read_completion(b'{"prompt": "a", "stream_options": {"include_usage": null}}').include_usage


def test_null_zero_and_vllms_minus_one_mean_no_limit():
    body = read_completion(b'{"prompt": "a", "top_k": -1, "top_p": null, "temperature": 0, "stop": "x", "logprobs": null}')
    assert body.params(default_max_tokens=1) == SamplingParams(max_new_tokens=1, temperature=0, stop=("x",))
    assert not body.wants_logprobs


def test_a_chats_settings_are_those_of_a_completion():
    request = ChatRequest(
        (), max_new_tokens=4, temperature=0.5, top_p=0.9, top_k=7, n=3, seed=11, stop=("a",), logprobs=True, include_usage=True,
        shaping=SHAPING, ignore_eos=True, scaled_logprobs=True)
    body = body_of(request, stops=("a", "b"), stop_token_ids=[5], stream=True)
    assert body.params(default_max_tokens=16) == SamplingParams(
        max_new_tokens=4, temperature=0.5, top_p=0.9, top_k=7, seed=11, stop=("a", "b"), stop_token_ids=(5,), ignore_eos=True,
        scaled_logprobs=True, shaping=SHAPING)
    assert body.wants_logprobs and body.include_usage and body.n == 3 and body.stream
    assert not body_of(ChatRequest(()), stops=(), stop_token_ids=[], stream=False).wants_logprobs
    assert read_completion(b'{"prompt": "a", "logprobs": true}').num_top == 0


@pytest.mark.parametrize("data", [b"", b"[]", b'{"version": "one"}', b'{"version": 1, "interrupt": "now"}', b"\xff"])
def test_a_wrong_body_is_one_sentence(data):
    with pytest.raises(RefusedError, match="^the request body is wrong: "):
        read_body(SwitchBody, data)
