"""Streams of chats with calls and reasoning: what comes when, in which order, and how a stream ends early."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator

import aiohttp
import pytest

from engine.test_chats import BLOCK, CALL, FLAT, HALF, THOUGHT, TOOL, USER, answer, events, post, write_model
from offbeat.chat.answering import Answering
from offbeat.chat.anthropic import Anthropic
from offbeat.chat.completions import Completions
from offbeat.chat.dialects import ChatDialect
from offbeat.chat.messages import ChatRequest, Message
from offbeat.chat.responses import Responses
from offbeat.data.tokenizer import load_tokenizer
from offbeat.engine.chat_streams import ChatEvents, stream_chat
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Output
from offbeat.engine.server import EngineServer
from offbeat.engine.web import Disconnected
from offbeat.errors import EngineError, RefusedError
from waiting import wait_until

SAYS = {"\n": THOUGHT, THOUGHT: "x", "x": "y", "y": CALL, CALL: "z"}
PATHS = {
    "/v1/chat/completions": {"messages": USER, "tools": [TOOL]}, "/v1/responses": {"input": "3?", "tools": [FLAT]},
    "/v1/messages": {"messages": USER, "tools": [BLOCK], "max_tokens": 100}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return write_model(tmp_path_factory.mktemp("streams"), SAYS)


@pytest.fixture(scope="module")
def serving(folder):
    server = EngineServer(EngineOptions(model=folder))
    yield server, server.start()
    server.stop()


@pytest.fixture(scope="module")
def url(serving) -> str:
    return serving[1]


# -- events --------------------------------------------------------------------------------------------------------------------------------


def test_chat_completions_stream_reasoning_text_and_calls_in_the_order_of_the_answer(url) -> None:
    told = events(url, "/v1/chat/completions", **PATHS["/v1/chat/completions"], stream_options={"include_usage": True})
    deltas = [event["choices"][0]["delta"] for event in told if event["choices"]]
    call_id = deltas[5]["tool_calls"][0].pop("id")
    assert call_id.startswith("call_") and deltas == [
        {"role": "assistant", "content": None}, {"reasoning_content": "hm"}, {"content": "seven"}, {"content": "x"}, {"content": "y"},
        {"tool_calls": [{"index": 0, "type": "function", "function": {"name": "add", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 3}'}}]}, {"content": "z"}, {}]
    assert [event["choices"][0]["finish_reason"] for event in told if event["choices"]] == [None] * 8 + ["tool_calls"]
    again = answer(url, "/v1/chat/completions", **PATHS["/v1/chat/completions"])["usage"]
    for usage in (told[-1]["usage"], again):
        usage.pop("prompt_tokens_details")  # the second prompt was computed before
    assert told[-1]["usage"] == again
    assert len({event["id"] for event in told}) == 1


def test_responses_stream_numbered_items_each_whole_before_the_next(url) -> None:
    told = events(url, "/v1/responses", **PATHS["/v1/responses"])
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    part = ["response.content_part.added", "response.content_part.done"]
    item = ["response.output_item.added", "response.output_item.done"]
    assert [event["type"] for event in told] == [
        "response.created", "response.in_progress",
        item[0], part[0], "response.reasoning_text.delta", "response.reasoning_text.done", part[1], item[1],
        item[0], part[0], *["response.output_text.delta"] * 3, "response.output_text.done", part[1], item[1],
        item[0], "response.function_call_arguments.delta", "response.function_call_arguments.done", item[1],
        item[0], part[0], "response.output_text.delta", "response.output_text.done", part[1], item[1], "response.completed"]
    assert [event["output_index"] for event in told if "output_index" in event] == [0] * 6 + [1] * 8 + [2] * 4 + [3] * 6
    done = [event["item"] for event in told if event["type"] == item[1]]
    last = told[-1]["response"]
    assert last["output"] == done and len({entry["id"] for entry in done}) == 4 and last["usage"]["output_tokens"] == 6
    assert [entry["type"] for entry in done] == ["reasoning", "message", "function_call", "message"]
    assert [entry["content"][0]["text"] for entry in done if "content" in entry] == ["hm", "sevenxy", "z"]


def test_messages_stream_blocks_each_whole_before_the_next(url) -> None:
    told = events(url, "/v1/messages", **PATHS["/v1/messages"])
    start, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    assert [event["type"] for event in told] == [
        "message_start", start, delta, delta, stop, start, delta, delta, delta, stop, start, delta, stop, start, delta, stop,
        "message_delta", "message_stop"]
    assert [event["index"] for event in told if "index" in event] == [0] * 4 + [1] * 5 + [2] * 3 + [3] * 3
    assert [event["delta"]["text"] for event in told if event.get("delta", {}).get("type") == "text_delta"] == ["seven", "x", "y", "z"]
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None} and told[-2]["usage"] == {"output_tokens": 6}
    whole = answer(url, "/v1/messages", **PATHS["/v1/messages"])
    assert told[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"] and whole["usage"]["output_tokens"] == 6
    # The blocks come back as the one message that the whole answer is.
    call = {"type": "tool_use", "id": "1", "name": "add", "input": {}}
    blocks = [{"type": "text", "text": "sevenxy"}, call, {"type": "text", "text": "z"}]
    again = Anthropic().read(json.dumps({"messages": [*USER, {"role": "assistant", "content": blocks}, *USER]}).encode())
    assert again.messages[1].content == "sevenxyz" and len(again.messages[1].calls) == 1


def test_several_samples_and_log_probabilities_stream(url) -> None:
    body = {**PATHS["/v1/chat/completions"], "n": 2, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    told, whole = events(url, "/v1/chat/completions", **body), answer(url, "/v1/chat/completions", **body)
    for choice in whole["choices"]:
        mine = [event["choices"][0] for event in told if event["choices"][0]["index"] == choice["index"]]
        assert "".join(one["delta"].get("content") or "" for one in mine) == choice["message"]["content"] == "sevenxyz"
        entries = [entry for one in mine for entry in (one["logprobs"] or {"content": []})["content"]]
        assert entries == choice["logprobs"]["content"] and len(entries) == 6
        assert mine[-1]["token_ids"] == choice["token_ids"] and mine[-1]["finish_reason"] == "tool_calls"
    told = events(url, "/v1/responses", input="3?", include=["message.output_text.logprobs"])
    (part,) = [event["part"] for event in told if event["type"] == "response.content_part.done" and "logprobs" in event["part"]]
    assert [entry["token"] for entry in part["logprobs"]] == [THOUGHT, "x", "y", CALL, "z", "<|im_end|>"]


@pytest.mark.parametrize(("body", "content", "reason"), [
    ({"max_tokens": 2}, "sevenx", "max_tokens"), ({"stop_sequences": ["y"]}, "sevenx", "stop_sequence"),
    ({"stop_sequences": ["nx"]}, "seve", "stop_sequence"), ({"tool_choice": {"type": "none"}}, f"sevenxy{CALL}z", "end_turn"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "sevenxy", "tool_use")])
def test_a_stream_ends_as_the_whole_answer_does(url, body, content, reason) -> None:
    body = {**PATHS["/v1/messages"], **body}
    told, whole = events(url, "/v1/messages", **body), answer(url, "/v1/messages", **body)
    texts = [event["delta"]["text"] for event in told if event.get("delta", {}).get("type") == "text_delta"]
    assert "".join(texts) == "".join(block["text"] for block in whole["content"] if block["type"] == "text") == content
    assert told[-2]["delta"] == {"stop_reason": reason, "stop_sequence": whole["stop_sequence"]} and whole["stop_reason"] == reason
    assert told[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_an_answer_that_was_cut_is_incomplete_and_a_half_call_is_its_text(tmp_path) -> None:
    server = EngineServer(EngineOptions(model=write_model(tmp_path, {"\n": HALF, HALF: "x", "x": "x"})))
    try:
        told = events(server.start(), "/v1/responses", input="3?", tools=[FLAT], max_output_tokens=4)
    finally:
        server.stop()
    deltas = [event["delta"] for event in told if event["type"] == "response.output_text.delta"]
    assert deltas == [HALF + "xxx"] and told[-1]["type"] == "response.incomplete"
    assert told[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"} and told[-2]["item"]["status"] == "incomplete"


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_is_refused_has_the_status_of_the_refusal(url, path) -> None:
    status, text = post(url, path, {**PATHS[path], "stream": True, "temperature": -1})
    assert status == 400 and "temperature must be 0" in json.loads(text)["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_the_samples_of_a_client_that_leaves_its_stream_are_aborted(folder, path, slow_down) -> None:
    server = EngineServer(EngineOptions(model=folder))
    try:
        url, let_go = server.start(), slow_down(server._engine)

        async def leave() -> None:
            async with aiohttp.ClientSession() as session:
                async with session.post(url + path, json={**PATHS[path], "stream": True, "ignore_eos": True}) as response:
                    await response.content.readany()
                    assert server._engine.num_running == 1

        asyncio.run(asyncio.wait_for(leave(), 60))
        wait_until(lambda: server._engine.num_running == 0 and not server._submissions, timeout_s=30)
        assert server._engine.finished["abort"] == 1
        assert isinstance(let_go, threading.Event)
    finally:
        server.stop()


# -- sending -------------------------------------------------------------------------------------------------------------------------------


def told(folder: str, dialect: ChatDialect, outputs, *, keep_alive_s: float = 9.0) -> list[bytes]:
    """Send outputs, each a text or an error, or a wait in seconds; returns what was sent, a refusal before the headers as its error."""
    tokenizer = load_tokenizer(folder)
    answering = Answering.of(tokenizer)
    chat = answering.prepare_chat(ChatRequest((Message("user", "3?"),), stream=True), dialect)

    async def made() -> AsyncGenerator[Output]:
        for output in outputs:
            if isinstance(output, Exception):
                raise output
            if isinstance(output, float):
                await asyncio.sleep(output)
                continue
            ids = tokenizer.encode(output)
            yield Output(0, ids, [-0.5] * len(ids), [0] * len(ids), "stop" if output == "<|im_end|>" else None)

    async def send() -> list[bytes]:
        events = ChatEvents(chat, answering, dialect, tokenizer, model="m")
        response = await stream_chat(events, made(), keep_alive=dialect.keep_alive, keep_alive_s=keep_alive_s)
        return [bytes(piece) async for piece in response.body_iterator if not isinstance(piece, str)]

    return asyncio.run(asyncio.wait_for(send(), 60))


@pytest.mark.parametrize("dialect", [Completions(), Responses(), Anthropic()])
def test_an_error_in_the_middle_of_a_stream_is_its_last_event(folder, dialect) -> None:
    *_, last = told(folder, dialect, ["x", EngineError("it died")])
    data = json.loads(last[last.index(b"data: ") + 6 :])
    assert data["error"]["message"] == "it died"
    if isinstance(dialect, Responses):
        assert data["type"] == "error" and data["sequence_number"] == 5
    with pytest.raises(RefusedError, match="no"):
        told(folder, dialect, [RefusedError("no")])
    assert len(told(folder, dialect, ["x", Disconnected()])) == 1


@pytest.mark.parametrize("dialect", [Responses(), Anthropic()])
def test_a_stream_with_nothing_to_tell_sends_signs_of_life(folder, dialect) -> None:
    sent = told(folder, dialect, [0.3, "x", 0.3, "<|im_end|>"], keep_alive_s=0.1)
    at = next(at for at, piece in enumerate(sent) if piece != dialect.keep_alive)
    assert at >= 1 and sent[at + 1] == dialect.keep_alive and b"x" in sent[at]
    held = told(folder, dialect, ["<think>", "\n", 0.15, "\n", 0.15, "\n", "<|im_end|>"], keep_alive_s=0.1)
    assert held.count(dialect.keep_alive) >= 2
