"""Completions over HTTP: OpenAI's answers, several prompts, stops, echoes and scores of prompts."""

import base64
import shutil

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from engine_http import RL, fetch, run, serving, stream
from offbeat.data.tokenizer import load_tokenizer
from offbeat.engine.completion_endpoints import complete_requests, write_running
from offbeat.engine.request import Output
from offbeat.inference.dialects.completions import read_running


def test_a_prompt_of_text_begins_with_the_bos_that_the_tokenizer_adds(model_folder, tmp_path):
    folder = shutil.copytree(model_folder("qwen3"), tmp_path / "with-bos")
    tokenizer = load_tokenizer(folder)
    tokenizer.hf.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 2)])
    tokenizer.save(folder)
    with serving(str(folder)) as (_, url):
        greedy = {"max_tokens": 4, "temperature": 0, **RL}
        text, ids = (fetch(url, "/v1/completions", {"prompt": prompt, **greedy})[2] for prompt in ("12>", [2, *tokenizer.encode("12>")]))
    assert text["usage"]["prompt_tokens"] == 4
    assert text["choices"][0]["token_ids"] == ids["choices"][0]["token_ids"]


def test_a_completion_from_token_ids_has_tokens_logprobs_and_versions(url, reference):
    prompt = [5, 9, 20, 3]
    status, _, answer = fetch(url, "/v1/completions", {"prompt": prompt, "n": 3, "max_tokens": 7, "seed": 1, **RL})
    assert status == 200 and answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["usage"] == {
        "prompt_tokens": 4, "completion_tokens": 21, "total_tokens": 25, "prompt_tokens_details": {"cached_tokens": 0}}
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "length" and choice["versions"] == [0] * 7
        expected = reference("qwen3").logprobs(prompt + choice["token_ids"])[3:]
        assert torch.allclose(torch.tensor(choice["logprobs"]["token_logprobs"]), expected, atol=1e-4)
    again = fetch(url, "/v1/completions", {"prompt": prompt, "n": 3, "max_tokens": 7, "seed": 1, **RL})[2]
    assert [c["token_ids"] for c in again["choices"]] == [c["token_ids"] for c in answer["choices"]]


@pytest.mark.parametrize("streams", [False, True])
def test_several_prompts_have_the_answers_that_each_would_have_alone(url, streams):
    prompts = [[5, 9, 20, 3], "12+3=", [7, 8]]
    more = {"n": 2, "max_tokens": 6, "seed": 1, "return_token_ids": True, "ignore_eos": True}
    alone = [choice["token_ids"] for prompt in prompts
             for choice in fetch(url, "/v1/completions", {"prompt": prompt, **more})[2]["choices"]]
    together: list[list[int]] = [[] for _ in alone]
    if streams:
        for event in run(stream(url, "/v1/completions", {"prompt": prompts, **more, "stream": True})):
            for choice in event["choices"]:
                together[choice["index"]] += choice["token_ids"]
    else:
        answer = fetch(url, "/v1/completions", {"prompt": prompts, **more})[2]
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert answer["usage"] == {
            "prompt_tokens": 11, "completion_tokens": 36, "total_tokens": 47, "prompt_tokens_details": {"cached_tokens": 0}}
        together = [choice["token_ids"] for choice in answer["choices"]]
    assert together == alone


def test_a_completion_has_arrays_for_those_who_ask_for_them(url):
    body = {"prompt": [5, 9, 20, 3], "n": 2, "max_tokens": 7, "seed": 1, "encoding_format": "base64", **RL}
    lists, arrays = (fetch(url, "/v1/completions", body | form)[2]["choices"] for form in ({"encoding_format": "float"}, {}))
    for told, packed in zip(lists, arrays, strict=True):
        assert np.frombuffer(base64.b64decode(packed["token_ids"]), "<i4").tolist() == told["token_ids"]
        assert np.frombuffer(base64.b64decode(packed["versions"]), "<i4").tolist() == told["versions"]
        packed_logprobs = base64.b64decode(packed["logprobs"]["token_logprobs"])
        assert np.frombuffer(packed_logprobs, "<f4").tolist() == told["logprobs"]["token_logprobs"], "float32 holds all of them"
    status, _, refused = fetch(url, "/v1/completions", body | {"encoding_format": "hex"})
    assert status == 400 and "encoding_format" in refused["error"]["message"]


def test_a_completion_from_text_has_text_and_16_tokens_by_default(url):
    _, _, answer = fetch(url, "/v1/completions", {"prompt": "12+3=", "temperature": 0, "ignore_eos": True, "frequency_penalty": 0})
    (choice,) = answer["choices"]
    assert answer["usage"]["prompt_tokens"] == 5 and answer["usage"]["completion_tokens"] == 16
    assert choice["text"] and choice["logprobs"] is None and "token_ids" not in choice


def test_text_is_cut_before_a_stop_string_and_tokens_are_not(url):
    free = fetch(url, "/v1/completions", {"prompt": "12", "max_tokens": 30, "seed": 3, **RL})[2]["choices"][0]
    stop = free["text"][8:10]
    body = {"prompt": "12", "max_tokens": 30, "seed": 3, "stop": stop, **RL}
    stopped = fetch(url, "/v1/completions", body)[2]["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == free["text"][: free["text"].index(stop)]
    assert stopped["token_ids"] == free["token_ids"][: len(stopped["token_ids"])] and len(stopped["token_ids"]) >= 2
    streamed = run(stream(url, "/v1/completions", {**body, "stream": True}))
    assert "".join(event["choices"][0]["text"] for event in streamed) == stopped["text"]


def test_stop_token_ids_end_with_the_token_included(url):
    free = fetch(url, "/v1/completions", {"prompt": "12", "max_tokens": 30, "seed": 3, **RL})[2]["choices"][0]
    stop = free["token_ids"][4]
    stopped = fetch(url, "/v1/completions", {"prompt": "12", "max_tokens": 30, "seed": 3, "stop_token_ids": [stop], **RL})[2]["choices"][0]
    assert stopped["token_ids"] == free["token_ids"][: free["token_ids"].index(stop) + 1]


def test_a_stop_string_stays_where_that_is_asked_for(url):
    body = {"prompt": [5, 6], "max_tokens": 12, "guided_regex": "ab,c+", "stop": ","}
    texts = [fetch(url, "/v1/completions", {**body, "include_stop_str_in_output": keep})[2]["choices"][0]["text"] for keep in (True, False)]
    assert texts == ["ab,", "ab"]


def test_a_prompt_that_is_echoed_has_its_tokens_log_probabilities_and_places(url, reference):
    ids = [5, 9, 20]
    table = reference("qwen3").logits(ids)[:-1].log_softmax(-1)
    score = [float(table[at, token]) for at, token in enumerate(ids[1:])]
    body = {"prompt": ids, "max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True}
    (choice,) = fetch(url, "/v1/completions", body)[2]["choices"]
    told = choice["logprobs"]
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:3] == pytest.approx(score, abs=1e-4) and len(told["token_logprobs"]) == 5
    assert [max(row.values()) for row in told["top_logprobs"][1:3]] == pytest.approx(table.max(-1).values.tolist(), abs=1e-4)
    assert "".join(told["tokens"]) == choice["text"] and told["text_offset"] == [
        len("".join(told["tokens"][:at])) for at in range(5)]
    prompt = choice["prompt_logprobs"]
    assert prompt[0] is None and prompt[1]["9"]["logprob"] == pytest.approx(score[0], abs=1e-4)
    whole = fetch(url, "/v1/completions", {"prompt": "12", "max_tokens": 0, "echo": True, "logprobs": 1})[2]["choices"][0]
    assert whole["text"] == "12" and len(whole["logprobs"]["token_logprobs"]) == 2 and whole["finish_reason"] == "length"
    (piece,) = run(stream(url, "/v1/completions", {"prompt": "12", "max_tokens": 0, "echo": True, "logprobs": 1, "stream": True}))
    assert piece["choices"] == [whole]


PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]


def test_prompts_of_one_request_are_scored_together_each_with_its_own_numbers(url, reference):
    body = {"prompt": PROMPTS, "max_tokens": 2, "temperature": 0, "logprobs": 3, "echo": True, "n": 2, "return_token_ids": True}
    status, _, answer = fetch(url, "/v1/completions", body)
    assert status == 200 and len(answer["choices"]) == 6, answer
    for choice in answer["choices"]:
        tokens, told = [*PROMPTS[choice["index"] // 2], *choice["token_ids"]], choice["logprobs"]
        expected = reference("qwen3").logits(tokens)[:-1].log_softmax(-1)
        assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
        own = [float(row[token]) for row, token in zip(expected, tokens[1:], strict=True)]
        assert told["token_logprobs"][1:] == pytest.approx(own, abs=1e-4)
        for row, found in zip(expected, told["top_logprobs"][1:], strict=True):
            top = row.topk(3)
            assert list(found) == [f"token_id:{token}" for token in top.indices.tolist()]
            assert list(found.values()) == pytest.approx(top.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("body", [{"echo": True, "logprobs": 21}, {"prompt_logprobs": 21}, {"prompt_logprobs": -1}])
def test_the_likeliest_tokens_of_a_prompt_are_bounded(url, body):
    status, _, answer = fetch(url, "/v1/completions", {"prompt": [5, 6], **body})
    assert status == 400 and "logprobs and prompt_logprobs of a prompt must be 0 to 20" in answer["error"]["message"], answer


def sample(index: int, tokens: list[int], reason: str | None = None) -> Output:
    return Output(index, tokens, [-float(token) for token in tokens], [4] * len(tokens), reason)


def test_samples_that_run_and_those_that_have_ended_come_in_order_with_the_tokens_that_are_new():
    have = {"r1": [0, 3, 1]}
    told = complete_requests(have, {"r1": [sample(2, [8, 9]), sample(0, [5])]}, {"r1": [sample(1, [1, 2, 3, 4, 0], "stop")]})
    assert [output.token_ids for output in told["r1"]] == [[5], [4, 0], [8, 9]]
    (samples,) = read_running(write_running(have, told)).values()
    assert [(each.first, *map(list, each.columns())) for each in samples] == [
        (0, [5], [-5.0], [4]), (3, [4, 0], [-4.0, 0.0], [4, 4]), (1, [8, 9], [-8.0, -9.0], [4, 4])]


def test_a_request_of_which_a_sample_is_missing_is_left_out():
    assert complete_requests({"r1": [0, 0]}, {"r1": [sample(0, [5])]}, {}) == {}
    assert complete_requests({"r1": [0]}, {}, {}) == {}


def test_samples_beyond_those_that_the_client_counts_are_left_out():
    told = complete_requests({"r1": [0]}, {"r1": [sample(0, [5])]}, {"r1": [sample(1, [6], "stop")]})
    assert [output.token_ids for output in told["r1"]] == [[5]]
