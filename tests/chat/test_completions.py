"""Chat completions: bodies as clients send them, answers whole and in events."""

import json
from dataclasses import replace

import pytest

from offbeat.chat.completions import Completions
from offbeat.chat.messages import ChatAnswer, ChatRequest, Message, Reply, TokenLogprob, Tool, ToolCall
from offbeat.errors import RefusedError

FUNCTION = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
ADD = Tool("add", "Add.", FUNCTION["parameters"])
USER = [{"role": "user", "content": "hi"}]
CALLS = (ToolCall("call_1", "add", '{"a": 3}'), ToolCall("call_2", "add", "{}"))


def read(messages=USER, at="engine", **body) -> ChatRequest:
    return Completions(at).read(json.dumps({"model": "m", "messages": messages, **body}).encode())


def answer(*replies: Reply) -> ChatAnswer:
    return ChatAnswer(id="1", created=7, model="m", replies=replies, num_prompt_tokens=5, num_cached_tokens=3)


def events(reply: ChatAnswer, request: ChatRequest | None = None) -> list[dict]:
    """Read a stream strictly: each event one line of data and an empty one, and the last one [DONE]."""
    stream = b"".join(Completions().events(request or ChatRequest(()), reply)).decode()
    assert stream.endswith("\n\n")
    lines = [event.removeprefix("data: ") for event in stream.removesuffix("\n\n").split("\n\n")]
    assert lines[-1] == "[DONE]" and not any("\n" in line for line in lines)
    return [json.loads(line) for line in lines[:-1]]


def test_a_conversation_with_calls_is_read_as_clients_send_it_back() -> None:
    request = read([
        {"role": "developer", "content": "Be exact."},
        {"role": "user", "content": [{"type": "text", "text": "3?"}, {"type": "text", "text": "4?"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "refusal": None, "audio": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}, "index": 0},
            {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "0"}], "name": "add"},
    ], tools=[{"type": "function", "function": {**FUNCTION, "strict": True}}], parallel_tool_calls=False, store=False, user="u")
    assert request.messages == (
        Message("system", "Be exact."), Message("user", "3?\n4?"), Message("assistant", "", CALLS, reasoning="hm"),
        Message("tool", "3", call_id="call_1", name="add"), Message("tool", "0", call_id="call_2", name="add"))
    assert request.tools == (replace(ADD, strict=True),) and request.tool_choice == "auto"
    assert not request.parallel_calls and request.model == "m"


def test_a_call_in_the_older_form_and_a_refusal_are_read() -> None:
    called, result, refused = read([
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 3}'}},
        {"role": "function", "name": "add", "content": "7"},
        {"role": "assistant", "content": None, "refusal": "I will not."}]).messages
    assert called.calls == (ToolCall("add", "add", '{"a": 3}'),) and (result.call_id, result.name) == ("add", "add")
    assert refused.content == "I will not."
    with pytest.raises(RefusedError, match="audio refers to an answer in sound"):
        read([{"role": "assistant", "audio": {"id": "audio_1"}}])


def test_variables_of_the_chat_template_are_read_within_bounds() -> None:
    assert read(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low").template_kwargs == {"enable_thinking": False}
    assert (read(reasoning_effort="low").effort, read().effort) == ("low", "")
    with pytest.raises(RefusedError, match="chat_template_kwargs must not hold 'messages'"):
        read(chat_template_kwargs={"messages": []})
    with pytest.raises(RefusedError, match="chat_template_kwargs may have 16384 bytes, got"):
        read(chat_template_kwargs={"text": "x" * 20000})
    with pytest.raises(RefusedError, match="chat_template_kwargs is not honoured in training"):
        read(at="proxy", chat_template_kwargs={"enable_thinking": False})


def test_arguments_may_come_as_an_object() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
    assert read([*USER, {"role": "assistant", "tool_calls": [call]}]).messages[1].calls == (ToolCall("c", "add", '{"a": "é"}'),)


def test_settings_are_read() -> None:
    request = read(max_completion_tokens=9, temperature=0.5, top_p=0.9, top_k=4, n=2, seed=1, stop="a", logprobs=True, stream=True,
                   stream_options={"include_usage": True}, response_format={"type": "text"}, frequency_penalty=0, logit_bias={},
                   modalities=["text"], service_tier="auto", prompt_cache_key="k", reasoning_effort="low")
    assert (request.max_new_tokens, request.temperature, request.top_p, request.top_k, request.n, request.seed) == (9, 0.5, 0.9, 4, 2, 1)
    assert request.stop == ("a",) and request.logprobs and request.stream and request.include_usage
    bare = read(stop=None, n=None, stream=None, tools=None, tool_choice=None, logprobs=None, max_tokens=3, max_completion_tokens=9)
    assert bare == ChatRequest((Message("user", "hi"),), model="m", max_new_tokens=3)
    assert read(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize(("choice", "wanted"), [
    ("none", ("none", "")), ("required", ("required", "")), ({"type": "function", "function": {"name": "add"}}, ("required", "add"))])
def test_a_choice_of_tools_is_read(choice, wanted) -> None:
    request = read(tools=[{"type": "function", "function": FUNCTION}], tool_choice=choice)
    assert (request.tool_choice, request.tool_name) == wanted


TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}


@pytest.mark.parametrize(("body", "told"), [
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format of type 'json_schema' needs a schema"),
    ({"response_format": {"type": "grammar"}}, "response_format.type must be 'text', 'json_object' or 'json_schema', got 'grammar'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "must be a data URI, got 'x'"),
    ({"messages": [{"role": "oracle", "content": "x"}]}, r"messages\[0\].role must be one of system, .*got 'oracle'"),
    ({"messages": []}, "messages is empty"),
    ({"tools": [{"type": "web_search"}]}, "tools has one of type 'web_search'"),
    ({"tools": TOOLS["tools"] * 2}, "tools has 'add' twice"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "must have a name"),
    ({"tool_choice": "required"}, "tool_choice requires a call, but tools is empty"),
    ({**TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "names 'sub', which is not among tools: add"),
    ({**TOOLS, "tool_choice": "maybe"}, "must be 'auto', 'none', 'required' or name one tool, got 'maybe'"),
    ({**TOOLS, "tool_choice": {"type": "allowed_tools"}}, "got type 'allowed_tools'"),
    ({"functions": [FUNCTION]}, "functions is not honoured"),
    ({"presence_penalty": 3}, "presence_penalty must be -2 to 2, got 3"), ({"logit_bias": {"x": 1}}, "logit_bias takes token ids"),
    ({"scaled_logprobs": True}, "scaled_logprobs is not honoured by this service, got True"),
    ({"guided_choice": []}, "choice takes 1 to 4096 texts"),
    ({"modalities": ["text", "audio"]}, "modalities is not honoured"),
    ({"n": 0}, "n must be >= 1, got 0"),
    ({"temperature": "hot"}, r"Expected `float \| null`, got `str` - at `\$.temperature`"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "{"}}]}]}, "are not JSON"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "3"}}]}]}, "a JSON object"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}]}, "call of type 'custom'"),
])
def test_what_cannot_be_honoured_is_refused_in_a_sentence(body, told) -> None:
    with pytest.raises(RefusedError, match=told):
        read(**{"messages": USER, **body}, at="service")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"messages": 3}', b"\xff", b"[" * 9999])
def test_a_body_that_is_no_request_is_refused(body) -> None:
    with pytest.raises(RefusedError, match="the request body is wrong"):
        Completions().read(body)


def test_a_whole_answer_has_calls_beside_null() -> None:
    whole = json.loads(Completions().whole(ChatRequest(()), answer(
        Reply(Message("assistant", calls=CALLS, reasoning="hm"), "tool_calls", num_tokens=4),
        Reply(Message("assistant", "seven"), "stop", num_tokens=2, logprobs=(
            TokenLogprob("sev", -1.0, b"sev"), TokenLogprob("en", -0.5, b"en"))))))
    assert whole["id"] == "chatcmpl-1" and whole["object"] == "chat.completion" and (whole["created"], whole["model"]) == (7, "m")
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 3}}
    first, second = whole["choices"]
    assert first["finish_reason"] == "tool_calls" and first["message"] == {
        "role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}},
            {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": "{}"}}]}
    assert second["index"] == 1 and second["message"] == {"role": "assistant", "content": "seven"}
    assert second["logprobs"] == {"content": [
        {"token": "sev", "logprob": -1.0, "bytes": [115, 101, 118], "top_logprobs": []},
        {"token": "en", "logprob": -0.5, "bytes": [101, 110], "top_logprobs": []}]}


def test_a_stream_of_calls_has_their_names_first_and_their_arguments_after() -> None:
    reply = Reply(Message("assistant", "ok", CALLS), "tool_calls", num_tokens=4)
    told = events(answer(reply))
    assert {event["object"] for event in told} == {"chat.completion.chunk"} and not any("usage" in event for event in told)
    deltas = [event["choices"][0]["delta"] for event in told]
    assert deltas == [
        {"role": "assistant", "content": ""}, {"content": "ok"},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 3}'}}]},
        {"tool_calls": [{"index": 1, "id": "call_2", "type": "function", "function": {"name": "add", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}, {}]
    assert [event["choices"][0]["finish_reason"] for event in told] == [None] * 6 + ["tool_calls"]


def test_a_stream_ends_with_the_numbers_of_tokens_if_they_are_wanted() -> None:
    replies = [Reply(Message("assistant", text), "stop", num_tokens=2) for text in ("a", "b")]
    told = events(answer(*replies), ChatRequest((), include_usage=True))
    assert told[-1]["choices"] == [] and told[-1]["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}}
    assert all(event["usage"] is None for event in told[:-1])
    assert [event["choices"][0]["index"] for event in told[:-1]] == [0, 0, 0, 1, 1, 1]


def test_errors_are_in_openais_form() -> None:
    wanted = {"error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "invalid_request"}}
    assert json.loads(Completions().error("no", status=400, param="n")) == wanted
    stream = Completions().stream_error("dead", status=500)
    assert stream.startswith(b"data: ") and stream.endswith(b"\n\n") and json.loads(stream[6:])["error"]["type"] == "server_error"
    assert Completions().keep_alive.startswith(b":") and Completions().keep_alive.endswith(b"\n\n")
