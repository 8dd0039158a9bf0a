"""Answers in OpenAI's words; the server's tests send them over HTTP."""

import json
from dataclasses import replace

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offbeat.data.tokenizer import Tokenizer, character_tokenizer
from offbeat.engine.answers import Answer, ChatFormat, CompletionFormat
from offbeat.engine.request import Output
from offbeat.engine.wire import CompletionBody, StreamOptions
from offbeat.inference.dialects.completions import read_samples

TOKENIZER = character_tokenizer()


def answer(form, **body) -> Answer:
    return Answer("id-1", form, CompletionBody(prompt=[1], **body), tokenizer=TOKENIZER, model="tiny", prompt_len=3)


def output(index: int, text: str, reason: str | None = "stop") -> Output:
    ids = TOKENIZER.encode(text)
    return Output(index, ids, [-0.5] * len(ids), [7] * len(ids), reason)


def test_samples_come_in_order_with_their_usage() -> None:
    whole = json.loads(answer(CompletionFormat(), n=2).whole([output(1, "34"), output(0, "1", "length")]))
    assert (whole["id"], whole["object"], whole["model"]) == ("id-1", "text_completion", "tiny")
    assert [(c["index"], c["text"], c["finish_reason"], c["logprobs"]) for c in whole["choices"]] == [
        (0, "1", "length", None), (1, "34", "stop", None)]
    assert whole["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 0}}
    assert "token_ids" not in whole["choices"][0]


@pytest.mark.parametrize("streams", [False, True])
def test_cached_tokens_are_counted_once_for_each_prompt_and_read_by_clients(streams: bool) -> None:
    options = {"n": 2, "stream": streams, "stream_options": StreamOptions(include_usage=True), "logprobs": 0, "return_token_ids": True}
    outputs = [replace(output(index, "12"), num_cached=16 * (1 + index // 2)) for index in (3, 0, 1, 2)]
    told = answer(CompletionFormat(), **options)
    if streams:
        for part in outputs:
            told.piece(part)
        usage = json.loads(told.ending().split(b"\n")[0].removeprefix(b"data: "))["usage"]
    else:
        whole = told.whole(outputs)
        usage = json.loads(whole)["usage"]
        assert [sample.num_cached_tokens for sample in read_samples(whole, adapter="", num_top=0)] == [48] * 4
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16 + 32}


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens_details": None}, {"prompt_tokens_details": {"cached_tokens": None}}])
def test_engines_that_do_not_tell_cached_tokens_have_none(usage: dict | None) -> None:
    told = json.loads(answer(CompletionFormat(), logprobs=0, return_token_ids=True).whole([output(0, "12")]))
    (sample,) = read_samples(json.dumps({**told, "usage": usage}).encode(), adapter="", num_top=0)
    assert sample.num_cached_tokens == 0


def test_tokens_logprobs_and_versions_are_given_on_request_and_text_is_cut_at_a_stop() -> None:
    (choice,) = json.loads(answer(CompletionFormat(), logprobs=0, return_token_ids=True, stop=["="]).whole([output(0, "12=3")]))["choices"]
    assert choice["text"] == "12"
    assert choice["token_ids"] == TOKENIZER.encode("12=3")
    assert choice["logprobs"] == {"token_logprobs": [-0.5] * 4, "tokens": ["1", "2", "=", "3"], "text_offset": [0, 1, 2, 3]}
    assert choice["versions"] == [7] * 4


def test_arrays_hold_what_lists_hold() -> None:
    told = replace(output(0, "12=3"), logprobs=[-0.5, -0.25, 0.0, -7.5])
    forms = [(CompletionFormat(), {}), (CompletionFormat(packed=True), {"encoding_format": "base64"})]
    answers = [answer(form, logprobs=0, return_token_ids=True, **body).whole([told]) for form, body in forms]
    lists, arrays = (read_samples(data, adapter="", num_top=0)[0] for data in answers)
    assert (lists.token_ids, lists.logprobs, lists.versions) == (arrays.token_ids, arrays.logprobs, arrays.versions)
    assert arrays.logprobs == (-0.5, -0.25, 0.0, -7.5) and arrays.text == lists.text == "12=3"


def test_the_likeliest_tokens_are_told_by_id() -> None:
    told = replace(output(0, "1"), top_logprobs=[((4, -0.1), (5, -2.0))])
    (choice,) = json.loads(answer(CompletionFormat(), logprobs=2).whole([told]))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:4": -0.1, "token_id:5": -2.0}]


def test_the_places_of_tokens_count_the_space_before_the_first() -> None:
    backend = Backend(models.WordLevel({"<unk>": 0, "</s>": 1, "\u2581a": 2, "\u2581b": 3}, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    spaced = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"), "spaced")
    body = CompletionBody(prompt="a", logprobs=0)
    told = Answer("id-1", CompletionFormat(), body, tokenizer=spaced, model="tiny", prompt_len=1).whole(
        [Output(0, [2, 3], [-0.5] * 2, [7] * 2, "length")])
    (choice,) = json.loads(told)["choices"]
    assert choice["text"] == " a b" and choice["logprobs"]["text_offset"] == [0, 2]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_token_that_stopped_a_sample_is_not_in_its_text(reason: str) -> None:
    ended, text = output(0, "123", reason), "12" if reason == "stop" else "123"
    body = {"stop_token_ids": TOKENIZER.encode("3")}
    (choice,) = json.loads(answer(CompletionFormat(), return_token_ids=True, **body).whole([ended]))["choices"]
    assert (choice["text"], choice["token_ids"]) == (text, TOKENIZER.encode("123"))
    event = json.loads(answer(CompletionFormat(), stream=True, **body).piece(ended).removeprefix(b"data: "))
    assert event["choices"][0]["text"] == text


@pytest.mark.parametrize(("form", "read"), [
    (CompletionFormat(), lambda choice: choice["text"]), (ChatFormat(), lambda choice: choice["delta"]["content"])])
def test_pieces_of_a_stream_add_up_to_the_text(form, read) -> None:
    streaming = answer(form, stream=True)
    pieces = [streaming.piece(output(0, "1", None)), streaming.piece(output(0, "23"))]
    events = [json.loads(piece.removeprefix(b"data: ")) for piece in pieces]
    assert "".join(read(event["choices"][0]) for event in events) == "123"
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, "stop"]


def test_a_chat_begins_as_the_assistant_with_each_token_beside_its_logprob() -> None:
    streaming = answer(ChatFormat(), logprobs=True)
    first, second = (json.loads(streaming.piece(output(0, text, None)).removeprefix(b"data: "))["choices"][0] for text in ("12", "3"))
    assert first["delta"] == {"role": "assistant", "content": "12"} and second["delta"] == {"content": "3"}
    assert first["logprobs"]["content"] == [
        {"token": digit, "logprob": -0.5, "bytes": [ord(digit)], "top_logprobs": []} for digit in "12"]


def test_a_stream_ends_with_the_numbers_of_tokens_if_they_are_wanted() -> None:
    plain = answer(CompletionFormat(), stream=True)
    assert b"usage" not in plain.piece(output(0, "12")) and plain.ending() == b"data: [DONE]\n\n"
    counted = answer(CompletionFormat(), stream=True, stream_options=StreamOptions(include_usage=True))
    pieces = [counted.piece(output(index, "12")) for index in (0, 1)]
    assert all(json.loads(piece.removeprefix(b"data: "))["usage"] is None for piece in pieces)
    last, done = counted.ending().decode().removesuffix("\n\n").split("\n\n")
    told = json.loads(last.removeprefix("data: "))
    assert told["choices"] == [] and told["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0}}
    assert done == "data: [DONE]"
