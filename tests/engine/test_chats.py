"""Chats over HTTP in three dialects: a model that writes calls, streams of both kinds, and what is refused."""

import asyncio
import json

import aiohttp
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from field_requests import field_requests
from offbeat.chat.messages import Message
from offbeat.chat.rendering import Renderer
from offbeat.data.tokenizer import load_tokenizer
from offbeat.engine.options import EngineOptions
from offbeat.engine.server import EngineServer
from support.chat_templates import PLAIN, tokenizer_with

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}
FLAT, BLOCK = {"type": "function", "name": "add", "parameters": PARAMETERS}, {"name": "add", "input_schema": PARAMETERS}
USER = [{"role": "user", "content": "3?"}]
CALL, HALF, REST = '<tool_call>{"name":"add","arguments":{"a":3}}</tool_call>', '<tool_call>{"name":"add"', '{"a":3}}</tool_call>'
THOUGHT, END = "<think>hm</think>\n\nseven", "<|im_end|>"


def write_model(folder, after: dict[str, str]) -> str:
    """Write a model whose next token depends on the last one alone: `after` says which follows which, and all others end the answer."""
    tokenizer = tokenizer_with(PLAIN)
    tokenizer.hf.add_tokens([CALL, HALF, REST, THOUGHT])
    tokenizer.hf.eos_token = END
    tokenizer.save(folder)
    size = len(tokenizer.hf)
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=size, n_embd=size, n_layer=1, n_head=1, n_positions=2048, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id))
    for parameter in model.parameters():
        parameter.data.zero_()
    model.transformer.ln_f.weight.data.fill_(1.0)
    model.transformer.wte.weight.data.copy_(torch.eye(size))
    model.lm_head.weight.data[tokenizer.eos_token_id] = 1.0
    for token, following in after.items():
        (old,), (new,) = tokenizer.encode(token), tokenizer.encode(following)
        model.lm_head.weight.data[:, old] = 0.0
        model.lm_head.weight.data[new, old] = 1.0
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """Gives a function that serves a model with these transitions and returns its URL."""
    servers: dict[str, tuple[EngineServer, str]] = {}

    def serve(after: dict[str, str], **options) -> str:
        key = json.dumps([after, options])
        if key not in servers:
            server = EngineServer(EngineOptions(model=write_model(tmp_path_factory.mktemp("says"), after), **options))
            servers[key] = server, server.start()
        return servers[key][1]

    yield serve
    for server, _ in servers.values():
        server.stop()


@pytest.fixture(scope="module")
def calls(serve) -> str:
    return serve({"\n": CALL})


def post(url: str, path: str, body: dict, headers: dict | None = None) -> tuple[int, str]:
    async def ask() -> tuple[int, str]:
        async with aiohttp.ClientSession() as session:
            async with session.post(url + path, json={"temperature": 0, **body}, headers=headers) as response:
                return response.status, await response.text()

    return asyncio.run(asyncio.wait_for(ask(), 120))


def answer(url: str, path: str, **body) -> dict:
    status, text = post(url, path, body)
    assert status == 200, text
    return json.loads(text)


def events(url: str, path: str, **body) -> list[dict]:
    status, text = post(url, path, {**body, "stream": True})
    assert status == 200, text
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: {")]


# -- calls ---------------------------------------------------------------------------------------------------------------------------------


def test_a_model_that_calls_a_tool_is_answered_as_a_call(calls) -> None:
    told = answer(calls, "/v1/chat/completions", messages=USER, tools=[TOOL], logprobs=True)
    (choice,) = told["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 3}'} and call["id"].startswith("call_")
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [CALL, END] and told["usage"]["completion_tokens"] == 2
    follow = [*USER, {**choice["message"], "reasoning_content": None}, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
    assert answer(calls, "/v1/chat/completions", messages=follow, tools=[TOOL])["choices"][0]["finish_reason"] == "tool_calls"


def test_token_ids_are_given_on_request_those_of_the_prompt_included(calls, serve) -> None:
    told = answer(calls, "/v1/chat/completions", messages=USER, tools=[TOOL], return_token_ids=True)
    (choice,) = told["choices"]
    assert len(choice["token_ids"]) == 2 and choice["versions"] == [0, 0]
    assert len(told["prompt_token_ids"]) == told["usage"]["prompt_tokens"]


def test_without_tools_the_same_text_is_text(calls) -> None:
    (choice,) = answer(calls, "/v1/chat/completions", messages=USER)["choices"]
    assert choice["message"] == {"role": "assistant", "content": CALL} and choice["finish_reason"] == "stop"
    none = answer(calls, "/v1/chat/completions", messages=USER, tools=[TOOL], tool_choice="none")["choices"][0]
    assert none["message"]["content"] == CALL


def test_a_call_that_was_cut_is_text(serve) -> None:
    url = serve({"\n": HALF})
    (choice,) = answer(url, "/v1/chat/completions", messages=USER, tools=[TOOL])["choices"]
    assert choice["message"] == {"role": "assistant", "content": HALF} and choice["finish_reason"] == "stop"


def test_a_tool_that_must_be_called_is_called(serve) -> None:
    url = serve({"\n": "x", " ": REST})
    auto = answer(url, "/v1/chat/completions", messages=USER, tools=[TOOL])["choices"][0]
    assert auto["message"]["content"] == "x"
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        (forced,) = answer(url, "/v1/chat/completions", messages=USER, tools=[TOOL], tool_choice=choice)["choices"]
        assert forced["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 3}'}


@pytest.mark.parametrize("named", [False, True])
def test_the_arguments_of_a_strict_tool_that_must_be_called_keep_to_its_schema(serve, named) -> None:
    url = serve({"\n": "x", " ": "x"})
    schema = {"type": "object", "properties": {"a": {"enum": [3]}}, "required": ["a"], "additionalProperties": False}
    other = {"type": "function", "function": {"name": "sub", "parameters": schema, "strict": True}}
    for strict in (False, True):
        function = {"name": "add", "parameters": schema, "strict": strict}
        tools = [{"type": "function", "function": function}, *([other] if named else ())]
        choice = {"type": "function", "function": {"name": "add"}} if named else "required"
        told = answer(url, "/v1/chat/completions", messages=USER, tools=tools, tool_choice=choice, max_tokens=900)["choices"][0]
        assert bool(told["message"].get("tool_calls")) == strict
    (call,) = told["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 3}
    body = {"input": "3?", "tools": [{**FLAT, "parameters": schema, "strict": True}], "tool_choice": "required", "max_output_tokens": 900}
    assert json.loads(answer(url, "/v1/responses", **body)["output"][0]["arguments"]) == {"a": 3}
    body = {"messages": USER, "tools": [{"name": "add", "input_schema": schema, "strict": True}], "tool_choice": {"type": "any"}}
    assert answer(url, "/v1/messages", **body, max_tokens=900)["content"][0]["input"] == {"a": 3}
    status, text = post(url, "/v1/chat/completions", {"messages": USER, "tools": tools, "tool_choice": choice, "bad_words": ["y"]})
    assert status == 400 and "bad_words cannot be kept beside the structure" in json.loads(text)["error"]["message"]


def test_an_answer_may_hold_several_calls_or_only_one(serve) -> None:
    url = serve({"\n": CALL, CALL: "\n"})
    body = {"messages": USER, "tools": [TOOL], "max_tokens": 4}
    assert len(answer(url, "/v1/chat/completions", **body)["choices"][0]["message"]["tool_calls"]) == 2
    one = answer(url, "/v1/chat/completions", **body, parallel_tool_calls=False)
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1 and one["usage"]["completion_tokens"] == 1


def test_each_api_tells_how_much_of_a_prompt_was_computed_before(serve) -> None:
    url = serve({"\n": CALL, CALL: "7"})
    chat = [{"role": "user", "content": "What is 3 times 3, and what comes after it?"}]

    def cached(path: str, usage: dict) -> tuple[int, int]:
        if path == "/v1/messages":
            return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
        if path == "/v1/responses":
            return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    first = cached("", answer(url, "/v1/chat/completions", messages=chat, max_tokens=2)["usage"])
    length, known = first[0], (first[0] - 1) // 16 * 16
    assert first[1] == 0 and known > 0
    for path, body in (
        ("/v1/chat/completions", {"messages": chat}), ("/v1/responses", {"input": chat}), ("/v1/messages", {"messages": chat}),
    ):
        most = {"max_output_tokens": 2} if path == "/v1/responses" else {"max_tokens": 2}
        assert cached(path, answer(url, path, **body, **most)["usage"]) == (length, known)
    told = events(url, "/v1/chat/completions", messages=chat, max_tokens=2, stream_options={"include_usage": True})
    assert cached("", told[-1]["usage"]) == (length, known)
    told = events(url, "/v1/messages", messages=chat, max_tokens=2)
    assert cached("/v1/messages", told[0]["message"]["usage"]) == (length, known)
    told = events(url, "/v1/responses", input=chat, max_output_tokens=2)
    assert cached("/v1/responses", told[-1]["response"]["usage"]) == (length, known)


def test_responses_and_messages_answer_alike(calls) -> None:
    told = answer(calls, "/v1/responses", input="3?", tools=[FLAT])
    (item,) = told["output"]
    assert told["status"] == "completed" and (item["type"], item["name"], item["arguments"]) == ("function_call", "add", '{"a": 3}')
    again = answer(calls, "/v1/responses", tools=[FLAT], input=[
        {"role": "user", "content": "3?"}, item, {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}])
    assert again["output"][0]["type"] == "function_call"
    told = answer(calls, "/v1/messages", messages=USER, tools=[BLOCK], max_tokens=64000)
    (block,) = told["content"]
    assert told["stop_reason"] == "tool_use" and (block["type"], block["name"], block["input"]) == ("tool_use", "add", {"a": 3})
    counted = answer(calls, "/v1/messages/count_tokens", messages=USER, tools=[BLOCK])
    assert counted["input_tokens"] == told["usage"]["input_tokens"] + told["usage"]["cache_read_input_tokens"]


def test_reasoning_is_told_apart_but_in_plain_chat_completions(serve) -> None:
    url = serve({"\n": THOUGHT})
    assert answer(url, "/v1/chat/completions", messages=USER)["choices"][0]["message"]["content"] == THOUGHT
    message = answer(url, "/v1/chat/completions", messages=USER, tools=[TOOL])["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "seven", "reasoning_content": "hm"}
    assert [item["type"] for item in answer(url, "/v1/responses", input="3?")["output"]] == ["reasoning", "message"]
    assert [block["type"] for block in answer(url, "/v1/messages", messages=USER, max_tokens=9)["content"]] == ["thinking", "text"]


def test_prompts_are_those_of_the_renderer(calls, tmp_path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path, {}))
    told = answer(calls, "/v1/messages", messages=USER, max_tokens=3)
    length = told["usage"]["input_tokens"] + told["usage"]["cache_read_input_tokens"]
    assert length == len(Renderer(tokenizer).prompt([Message("user", "3?")]))


# -- streams -------------------------------------------------------------------------------------------------------------------------------


def test_a_stream_with_tools_has_the_call_in_pieces(calls) -> None:
    told = events(calls, "/v1/chat/completions", messages=USER, tools=[TOOL], stream_options={"include_usage": True})
    deltas = [event["choices"][0]["delta"] for event in told if event["choices"]]
    assert deltas[0]["role"] == "assistant" and deltas[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": ""}
    assert deltas[2]["tool_calls"] == [{"index": 0, "function": {"arguments": '{"a": 3}'}}]
    assert told[-1]["usage"]["completion_tokens"] == 2
    told = events(calls, "/v1/responses", input="3?", tools=[FLAT])
    assert [event["sequence_number"] for event in told] == list(range(len(told))) and told[-1]["type"] == "response.completed"
    told = events(calls, "/v1/messages", messages=USER, tools=[BLOCK], max_tokens=9)
    assert told[0]["type"] == "message_start" and told[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_stream_without_tools_comes_token_by_token(serve) -> None:
    url = serve({"\n": "a", "a": "b", "b": "c"})
    told = events(url, "/v1/chat/completions", messages=USER, stream_options={"include_usage": True}, n=2)
    for index in (0, 1):
        mine = [event["choices"][0] for event in told if event["choices"] and event["choices"][0]["index"] == index]
        assert [choice["delta"] for choice in mine[:3]] == [{"role": "assistant", "content": "a"}, {"content": "b"}, {"content": "c"}]
        assert [choice["finish_reason"] for choice in mine] == [None, None, None, "stop"]
    assert told[-1]["choices"] == [] and told[-1]["usage"]["completion_tokens"] == 8
    whole = answer(url, "/v1/chat/completions", n=2, stop="c", messages=[{"role": "user", "content": [{"type": "text", "text": "3?"}]}])
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["ab", "ab"]
    stopped = answer(url, "/v1/messages", messages=USER, max_tokens=9, stop_sequences=["c"])
    assert stopped["content"] == [{"type": "text", "text": "ab"}] and stopped["stop_sequence"] == "c"


# -- refusals ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body", "told"), [
    ("/v1/chat/completions", {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format of type 'json_schema' needs"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "part of type 'image_url'"),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 5000}, "more than the context of 2048"),
    ("/v1/chat/completions", {"messages": USER, "tools": [TOOL], "temperature": -1, "stream": True}, "temperature must be 0"),
    ("/v1/responses", {"input": "x", "previous_response_id": "r"}, "previous_response_id is not honoured"),
    ("/v1/messages", {"messages": USER, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools has one of type 'bash_20250124'"),
    ("/v1/messages", {"messages": USER, "stop_sequences": [""]}, "stop must not hold an empty string"),
])
def test_what_cannot_be_done_is_answered_400_in_the_dialect(calls, path, body, told) -> None:
    status, text = post(calls, path, body)
    error = json.loads(text)
    assert status == 400 and told in error["error"]["message"] and error["error"]["type"] == "invalid_request_error"
    assert ("type" in error) == (path == "/v1/messages")


def test_the_key_may_come_in_anthropics_header(serve) -> None:
    url = serve({}, api_key="secret")
    body = {"messages": USER, "max_tokens": 1}
    status, text = post(url, "/v1/messages", body)
    assert status == 401 and json.loads(text)["error"]["type"] == "authentication_error"
    assert post(url, "/v1/messages", body, {"x-api-key": "secret"})[0] == 200
    assert post(url, "/v1/messages", body, {"x-api-key": "secret", "Authorization": "Bearer wrong"})[0] == 401


def test_every_field_acts_or_is_refused_or_harmless_as_the_table_says_over_http(calls) -> None:
    tried = 0
    for path, body, name, status in field_requests("engine"):
        got, text = post(calls, path, body)
        assert got == status, (path, name, text)
        if status == 400:
            told = json.loads(text)["error"]
            assert name in told["message"] and (path == "/v1/messages" or told["param"].partition("[")[0] == name)
        tried += 1
    assert tried > 300
