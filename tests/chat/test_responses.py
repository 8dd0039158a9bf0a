"""Responses: items as clients send them, answers whole and in numbered events."""

import json

import pytest

from offbeat.chat.messages import ChatAnswer, ChatRequest, Message, Reply, Tool, ToolCall
from offbeat.chat.responses import Responses
from offbeat.errors import RefusedError

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "name": "add", "description": "Add.", "parameters": PARAMETERS, "strict": True}
CALL = ToolCall("call_1", "add", '{"a": 3}')


def read(items="hi", at="engine", **body) -> ChatRequest:
    return Responses(at).read(json.dumps({"model": "m", "input": items, **body}).encode())


def answer(reply: Reply) -> ChatAnswer:
    return ChatAnswer(id="1", created=7, model="m", replies=(reply,), num_prompt_tokens=5, num_cached_tokens=3)


def whole(reply: Reply, **request) -> dict:
    return json.loads(Responses().whole(ChatRequest((), **request), answer(reply)))


def events(reply: Reply) -> list[dict]:
    """Read a stream strictly: each event is named as its type, and numbered from 0."""
    stream = b"".join(Responses().events(ChatRequest(()), answer(reply))).decode()
    assert stream.endswith("\n\n")
    read = []
    for number, event in enumerate(stream.removesuffix("\n\n").split("\n\n")):
        name, data = event.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}" and told["sequence_number"] == number
        read.append(told)
    return read


def test_text_alone_is_what_the_user_says() -> None:
    assert read(instructions="Be exact.", include=[], max_output_tokens=9, temperature=0.5, stream=True, store=False) == ChatRequest(
        (Message("system", "Be exact."), Message("user", "hi")), model="m", max_new_tokens=9, temperature=0.5, stream=True)


def test_the_items_of_an_answer_come_back_as_one_message() -> None:
    request = read([
        {"role": "user", "content": "3?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
            {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "arguments": '{"a": 3}', "status": "completed"},
        {"type": "function_call", "call_id": "call_2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "3"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "0"}]},
        {"type": "message", "role": "assistant", "content": "7"},
        {"role": "user", "content": [{"type": "input_text", "text": "sure?"}]},
    ], tools=[TOOL], tool_choice={"type": "function", "name": "add"}, text={"format": {"type": "text"}}, reasoning={"effort": "low"})
    assert request.messages == (
        Message("user", "3?"), Message("assistant", "Let me see.", (CALL, ToolCall("call_2", "add", "{}")), reasoning="hm"),
        Message("tool", "3", call_id="call_1", name="add"), Message("tool", "0", call_id="call_2", name="add"),
        Message("assistant", "7"), Message("user", "sure?"))
    assert request.tools == (Tool("add", "Add.", PARAMETERS, strict=True),)
    assert (request.tool_choice, request.tool_name, request.effort) == ("required", "add", "low")


def test_what_was_answered_can_be_sent_back() -> None:
    message = Message("assistant", "ok", (CALL,), reasoning="hm")
    items = whole(Reply(message, "tool_calls"))["output"]
    sent_back = read([{"role": "user", "content": "x"}, *items, {"type": "function_call_output", "call_id": "call_1", "output": "3"}])
    assert sent_back.messages[1] == message


@pytest.mark.parametrize(("body", "told"), [
    ({"previous_response_id": "resp_1"}, "previous_response_id is not honoured"),
    ({"conversation": {"id": "c"}}, "conversation is not honoured"),
    ({"background": True}, "background is not honoured"),
    ({"tools": [{"type": "web_search"}]}, "tools has one of type 'web_search', and none is built in"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format of type 'json_schema' needs a schema"),
    ({"items": []}, "input is empty"),
    ({"items": [{"type": "item_reference", "id": "x"}]}, r"input\[0\] has the type 'item_reference'"),
    ({"items": [{"role": "user", "content": [{"type": "input_image"}]}]}, "part of type 'input_image'"),
    ({"items": [{"role": "oracle", "content": "x"}]}, r"input\[0\].role must be one of"),
    ({"tool_choice": "required"}, "tools is empty"),
    ({"tool_choice": {"type": "web_search"}}, "got type 'web_search'"),
    ({"items": 3}, r"Expected `str \| array`, got `int` - at `\$.input`"),
])
def test_what_cannot_be_honoured_is_refused_in_a_sentence(body, told) -> None:
    with pytest.raises(RefusedError, match=told):
        read(**body, at="service")


def test_a_whole_answer_has_an_item_for_each_thing() -> None:
    told = whole(Reply(Message("assistant", "ok", (CALL,), reasoning="hm"), "tool_calls", num_tokens=4), tools=(Tool("add"),))
    assert told["id"] == "resp_1" and told["object"] == "response" and told["status"] == "completed" and told["created_at"] == 7
    assert [item["type"] for item in told["output"]] == ["reasoning", "message", "function_call"]
    assert told["output"][1]["content"] == [{"type": "output_text", "text": "ok", "annotations": [], "logprobs": []}]
    assert told["output"][2] == {
        "type": "function_call", "id": "fc_1_0", "call_id": "call_1", "name": "add", "arguments": '{"a": 3}', "status": "completed"}
    assert told["usage"] == {
        "input_tokens": 5, "output_tokens": 4, "total_tokens": 9, "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0}}
    assert told["tools"][0]["name"] == "add" and told["tool_choice"] == "auto" and told["parallel_tool_calls"] is True


def test_an_answer_that_was_cut_is_incomplete() -> None:
    told = whole(Reply(Message("assistant", "sev"), "length"))
    assert told["status"] == "incomplete" and told["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events(Reply(Message("assistant", "sev"), "length"))[-1]["type"] == "response.incomplete"
    assert whole(Reply(Message("assistant", ""), "stop"))["output"][0]["content"][0]["text"] == ""


def test_a_stream_tells_each_item_from_its_beginning_to_its_end() -> None:
    told = events(Reply(Message("assistant", "ok", (CALL,), reasoning="hm"), "tool_calls", num_tokens=4))
    part = ["response.content_part.added", "{}.delta", "{}.done", "response.content_part.done"]
    assert [event["type"].removeprefix("response.") for event in told] == [kind.removeprefix("response.") for kind in [
        "created", "in_progress",
        "output_item.added", *(kind.format("reasoning_text") for kind in part), "output_item.done",
        "output_item.added", *(kind.format("output_text") for kind in part), "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed"]]
    assert told[0]["response"]["status"] == "in_progress" and told[0]["response"]["output"] == [] and told[0]["response"]["usage"] is None
    for at, item in enumerate(told[-1]["response"]["output"]):
        mine = [event for event in told if event.get("output_index") == at]
        assert mine[0]["item"]["id"] == item["id"] and mine[0]["item"]["status"] == "in_progress" and mine[-1]["item"] == item
        assert {event["item_id"] for event in mine if "item_id" in event} == {item["id"]}
    assert "".join(event["delta"] for event in told if event["type"] == "response.output_text.delta") == "ok"
    assert json.loads("".join(e["delta"] for e in told if e["type"] == "response.function_call_arguments.delta")) == {"a": 3}


def test_an_error_in_a_stream_is_an_event_that_clients_raise() -> None:
    stream = Responses().stream_error("dead", status=500).decode()
    name, data = stream.removesuffix("\n\n").split("\n")
    told = json.loads(data.removeprefix("data: "))
    assert name == "event: error" and told["message"] == told["error"]["message"] == "dead"
    assert json.loads(Responses().error("no", status=400))["error"]["type"] == "invalid_request_error"
