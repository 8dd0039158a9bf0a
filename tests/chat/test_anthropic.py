"""Messages: blocks as clients send them, answers whole and in named events."""

import json

import pytest

from chats import CHATML, words
from offbeat.chat.anthropic import Anthropic
from offbeat.chat.messages import ChatAnswer, ChatRequest, Message, Reply, Tool, ToolCall
from offbeat.chat.rendering import Renderer
from offbeat.errors import RefusedError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Add.", "input_schema": SCHEMA}
CALL = ToolCall("toolu_1", "add", '{"a": 3}')
USER = [{"role": "user", "content": "hi"}]


def read(messages=USER, at="engine", **body) -> ChatRequest:
    return Anthropic(at).read(json.dumps({"model": "m", "max_tokens": 64, "messages": messages, **body}).encode())


def answer(reply: Reply) -> ChatAnswer:
    return ChatAnswer(id="1", created=7, model="m", replies=(reply,), num_prompt_tokens=8, num_cached_tokens=3)


def whole(reply: Reply) -> dict:
    return json.loads(Anthropic().whole(ChatRequest(()), answer(reply)))


def events(reply: Reply) -> list[dict]:
    """Read a stream strictly: each event is named as its type."""
    stream = b"".join(Anthropic().events(ChatRequest(()), answer(reply))).decode()
    assert stream.endswith("\n\n")
    read = []
    for event in stream.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        read.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {read[-1]['type']}"
    return read


def test_a_conversation_with_calls_is_read_as_clients_send_it_back() -> None:
    request = read([
        {"role": "user", "content": [{"type": "text", "text": "3?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Let me see."}, {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 3}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "3"}], "is_error": False},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "0"}, {"type": "tool_result", "tool_use_id": "toolu_3"},
            {"type": "text", "text": "Go on."}]},
    ], system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "exact."}], tools=[{**TOOL, "cache_control": {}}],
        stop_sequences=["END"], temperature=1, top_k=3, stream=True,
        metadata={"user_id": "u"}, thinking={"type": "enabled", "budget_tokens": 9})
    assert request.messages == (
        Message("system", "Be\nexact."), Message("user", "3?"), Message("assistant", "Let me see.", (CALL,), reasoning="hm"),
        Message("tool", "3", call_id="toolu_1", name="add"), Message("tool", "0", call_id="toolu_2"),
        Message("tool", "", call_id="toolu_3"), Message("user", "Go on."))
    assert request.tools == (Tool("add", "Add.", SCHEMA),) and request.stop == ("END",) and request.max_new_tokens == 64 and request.stream


def test_thinking_and_effort_are_read() -> None:
    asked = [read(USER, thinking={"type": kind}) for kind in ("enabled", "disabled", "adaptive")]
    assert [request.thinks for request in asked] == [True, False, None]
    assert read(USER, output_config={"effort": "low"}).effort == "low"
    with pytest.raises(RefusedError, match="thinking.type"):
        read(USER, thinking={"type": "deep"})


def test_a_result_that_is_an_error_says_so_to_the_model() -> None:
    request = read([
        {"role": "user", "content": "3?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 3}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "no b"}], "is_error": True},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "4", "is_error": None}]}])
    assert [message.content for message in request.messages[2:]] == ["Error: no b", "4"]
    rendered = Renderer(words(CHATML))
    assert "Error: no b" in rendered.tokenizer.decode(rendered.prompt(request.messages))


@pytest.mark.parametrize(("choice", "wanted"), [
    ({"type": "auto"}, ("auto", "", True)), ({"type": "any"}, ("required", "", True)), ({"type": "none"}, ("none", "", True)),
    ({"type": "tool", "name": "add", "disable_parallel_tool_use": True}, ("required", "add", False))])
def test_a_choice_of_tools_is_read(choice, wanted) -> None:
    request = read(tools=[TOOL], tool_choice=choice)
    assert (request.tool_choice, request.tool_name, request.parallel_calls) == wanted


@pytest.mark.parametrize(("body", "told"), [
    ({"messages": []}, "messages is empty"),
    ({"messages": [*USER, {"role": "assistant", "content": "{"}]}, "a begun answer is not continued here"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "a source of type 'base64' or 'url', got None"),
    ({"messages": [{"role": "oracle", "content": "x"}]}, "must be 'user' or 'assistant', got 'oracle'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools has one of type 'web_search_20250305'"),
    ({"tool_choice": {"type": "tool", "name": "sub"}, "tools": [TOOL]}, "names 'sub', which is not among tools: add"),
    ({"tool_choice": {"type": "any"}}, "tools is empty"),
    ({"output_format": {"type": "grammar"}}, "output_format.type must be 'text', 'json_object' or 'json_schema'"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format of type 'json_schema' needs a schema"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not honoured"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]}, "block of type 'image'"),
    ({"max_tokens": "many"}, r"at `\$.max_tokens`"),
])
def test_what_cannot_be_honoured_is_refused_in_a_sentence(body, told) -> None:
    with pytest.raises(RefusedError, match=told):
        read(**body, at="service")


def test_a_whole_answer_has_a_block_for_each_thing_and_can_be_sent_back() -> None:
    message = Message("assistant", "ok", (CALL,), reasoning="hm")
    told = whole(Reply(message, "tool_calls", num_tokens=4))
    assert told["id"] == "msg_1" and told["type"] == "message" and told["stop_reason"] == "tool_use" and told["stop_sequence"] is None
    assert told["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "ok"},
        {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 3}}]
    assert told["usage"] == {
        "input_tokens": 5, "output_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3}, "5 of 8 were computed"
    back = read([*USER, {"role": "assistant", "content": told["content"]}, {"role": "user", "content": "x"}]).messages[1]
    assert (back.content, back.reasoning, json.loads(back.calls[0].arguments)) == ("ok", "hm", {"a": 3})


@pytest.mark.parametrize(("reply", "reason", "sequence"), [
    (Reply(Message("assistant", "7"), "stop"), "end_turn", None), (Reply(Message("assistant", "7"), "length"), "max_tokens", None),
    (Reply(Message("assistant", "7"), "stop", stop="END"), "stop_sequence", "END"),
    (Reply(Message("assistant", ""), "abort"), "pause_turn", None)])
def test_the_reason_to_stop_is_told(reply, reason, sequence) -> None:
    assert (whole(reply)["stop_reason"], whole(reply)["stop_sequence"]) == (reason, sequence)


def test_a_stream_tells_each_block_from_its_beginning_to_its_end() -> None:
    told = events(Reply(Message("assistant", "ok", (CALL,), reasoning="hm"), "tool_calls", num_tokens=4))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in told] == [
        "message_start", block[0], block[1], *block[1:], *block, *block, "message_delta", "message_stop"]
    assert told[0]["message"]["content"] == [] and told[0]["message"]["usage"] == {
        "input_tokens": 5, "output_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3}
    assert [event["index"] for event in told if "index" in event] == [0] * 4 + [1] * 3 + [2] * 3
    assert [event["content_block"] for event in told if "content_block" in event] == [
        {"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": ""},
        {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}}]
    deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    assert deltas == [
        {"type": "thinking_delta", "thinking": "hm"}, {"type": "signature_delta", "signature": ""}, {"type": "text_delta", "text": "ok"},
        {"type": "input_json_delta", "partial_json": '{"a": 3}'}]
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None} and told[-2]["usage"] == {"output_tokens": 4}


def test_tokens_can_be_counted_without_an_answer() -> None:
    request = Anthropic().read(json.dumps({"model": "m", "messages": USER, "tools": [TOOL]}).encode())
    assert request.max_new_tokens is None and len(request.tools) == 1
    assert json.loads(Anthropic().count(12)) == {"input_tokens": 12}


@pytest.mark.parametrize(("status", "kind"), [
    (400, "invalid_request_error"), (401, "authentication_error"), (409, "invalid_request_error"), (429, "rate_limit_error"),
    (503, "api_error")])
def test_errors_are_in_anthropics_form(status, kind) -> None:
    assert json.loads(Anthropic().error("no", status=status)) == {"type": "error", "error": {"type": kind, "message": "no"}}
    assert Anthropic().stream_error("no", status=status).startswith(b"event: error\ndata: {")
    assert Anthropic().keep_alive == b'event: ping\ndata: {"type":"ping"}\n\n'
