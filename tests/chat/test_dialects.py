"""What the three dialects share: any answer, in any of them, is a whole stream that says the same as the whole answer."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.chat.anthropic import Anthropic
from offbeat.chat.completions import Completions
from offbeat.chat.dialects import ChatDialect, ContentPart, list_models, text_of
from offbeat.chat.messages import ChatAnswer, ChatRequest, Message, Reply, ToolCall
from offbeat.chat.responses import Responses
from offbeat.errors import RefusedError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
ARGUMENTS = st.dictionaries(TEXT, st.one_of(TEXT, st.integers(-9, 9)), max_size=2)
CALLS = st.lists(st.tuples(TEXT.filter(bool), ARGUMENTS), max_size=3)


@st.composite
def replies(draw) -> Reply:
    calls = tuple(ToolCall(f"call_{at}", name, json.dumps(a, ensure_ascii=False)) for at, (name, a) in enumerate(draw(CALLS)))
    message = Message("assistant", draw(TEXT), calls, reasoning=draw(TEXT))
    return Reply(message, "tool_calls" if calls else draw(st.sampled_from(["stop", "length"])), num_tokens=draw(st.integers(0, 9)))


def test_the_three_keep_the_contract() -> None:
    dialects: list[ChatDialect] = [Completions(), Responses(), Anthropic()]
    assert all(isinstance(dialect.keep_alive, bytes) for dialect in dialects)


def test_parts_become_lines() -> None:
    assert text_of([ContentPart("text", "a"), ContentPart("refusal", refusal="b")], "x") == "a\nb" and text_of(None, "x") == ""
    with pytest.raises(RefusedError, match="x has a part of type 'input_audio', and models here read text alone"):
        text_of([ContentPart("input_audio")], "x")


@settings(max_examples=60, deadline=None)
@given(reply=replies())
def test_any_answer_comes_back_from_its_stream(reply) -> None:
    answer, request = ChatAnswer(id="1", created=7, model="m", replies=(reply,), num_prompt_tokens=5), ChatRequest((), stream=True)
    assert _from_completions(b"".join(Completions().events(request, answer))) == reply.message
    assert _from_responses(b"".join(Responses().events(request, answer))) == reply.message
    back = _from_anthropic(b"".join(Anthropic().events(request, answer)))
    assert (back.content, back.reasoning) == (reply.message.content, reply.message.reasoning)
    assert [(c.id, c.name, json.loads(c.arguments)) for c in back.calls] == [
        (c.id, c.name, json.loads(c.arguments)) for c in reply.message.calls]


def test_models_are_listed_as_clients_of_each_api_read_them() -> None:
    told = json.loads(list_models({"base": 0.0, "tinker://run/sampler_weights/one": 1795412090.5}))
    assert (told["object"], told["first_id"], told["last_id"], told["has_more"]) == (
        "list", "base", "tinker://run/sampler_weights/one", False)
    _, entry = told["data"]
    assert entry["id"] == entry["display_name"] == "tinker://run/sampler_weights/one" and entry["created"] == 1795412090
    assert (entry["object"], entry["type"], entry["created_at"]) == ("model", "model", "2026-11-23T05:34:50Z")
    assert json.loads(list_models({}))["data"] == []



def _events(stream: bytes) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in stream.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def _from_completions(stream: bytes) -> Message:
    told = {"content": "", "reasoning_content": ""}
    calls: dict[int, list[str]] = {}
    for event in _events(stream):
        for choice in event["choices"]:
            for field in told:
                told[field] += choice["delta"].get(field) or ""
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    calls[call["index"]] = [call["id"], call["function"]["name"], ""]
                calls[call["index"]][2] += call["function"]["arguments"]
    return Message("assistant", told["content"], tuple(ToolCall(*call) for call in calls.values()), reasoning=told["reasoning_content"])


def _from_responses(stream: bytes) -> Message:
    texts = {"output_text": "", "reasoning_text": ""}
    calls: dict[int, ToolCall] = {}
    for event in _events(stream):
        _, kind, *what = event["type"].split(".")
        if kind in texts and what == ["delta"]:
            texts[kind] += event["delta"]
        elif kind == "output_item" and event["item"]["type"] == "function_call":
            item = event["item"]
            calls[event["output_index"]] = ToolCall(item["call_id"], item["name"], item["arguments"])
    return Message("assistant", texts["output_text"], tuple(calls.values()), reasoning=texts["reasoning_text"])


def _from_anthropic(stream: bytes) -> Message:
    blocks: dict[int, dict] = {}
    for event in _events(stream):
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "partial": ""}
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            for field, into in (("text", "text"), ("thinking", "thinking"), ("partial_json", "partial")):
                block[into] = block.get(into, "") + delta.get(field, "")
    texts = "".join(block["text"] for block in blocks.values() if block["type"] == "text")
    calls = tuple(ToolCall(b["id"], b["name"], b["partial"]) for b in blocks.values() if b["type"] == "tool_use")
    return Message("assistant", texts, calls, reasoning="".join(b["thinking"] for b in blocks.values() if b["type"] == "thinking"))
