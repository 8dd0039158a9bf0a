"""Answers on their way: whole or as a stream that shows life before, errors at both times, and clients that go."""

import asyncio
import json
from typing import Any

import pytest

from offbeat.chat.anthropic import Anthropic
from offbeat.chat.completions import Completions
from offbeat.chat.dialects import ChatDialect
from offbeat.chat.messages import ChatAnswer, ChatRequest, Message, Reply
from offbeat.chat.refusals import GONE, Refusal
from offbeat.chat.sending import ChatResponse
from offbeat.errors import EngineError

ANSWER = ChatAnswer("1", 7, "m", (Reply(Message("assistant", "x"), "stop"),), num_prompt_tokens=1)


def explain(exc: BaseException) -> Refusal:
    return Refusal(str(exc), 503, {"retry-after": "2"})


def send(
    dialect: ChatDialect, *, after_s: float = 0.0, fails: bool = False, stream: bool = False, leaves_after_s: float = 9.0,
) -> tuple[list[dict[str, Any]], list[Any]]:
    """What is sent, and what is noted: that the answer is sent, how it ended, and whether the work was cancelled."""
    sent: list[dict[str, Any]] = []
    noted: list[Any] = []

    async def work() -> ChatAnswer:
        try:
            await asyncio.sleep(after_s)
        except asyncio.CancelledError:
            noted.append("cancelled")
            raise
        if fails:
            raise EngineError("it died")
        return ANSWER

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(leaves_after_s)
        return {"type": "http.disconnect"}

    async def main() -> None:
        async def keep(message: dict[str, Any]) -> None:
            sent.append(message)

        task = asyncio.create_task(work())
        response = ChatResponse(
            task, dialect, ChatRequest((), stream=stream), explain=explain, sending=lambda: noted.append("sending"), keep_alive_s=0.02)
        response.ended = lambda status, sentence: noted.append((status, sentence))
        response.headers["x-request-id"] = "7"
        await response({"type": "http"}, receive, keep)  # type: ignore[reportArgumentType]
        await asyncio.wait([task])

    asyncio.run(main())
    return sent, noted


def test_a_whole_answer_has_its_length_and_the_headers_it_was_given() -> None:
    (start, body), noted = send(Completions())
    headers = dict(start["headers"])
    assert start["status"] == 200 and headers[b"content-type"] == b"application/json" and headers[b"x-request-id"] == b"7"
    assert int(headers[b"content-length"]) == len(body["body"]) and json.loads(body["body"])["choices"][0]["message"]["content"] == "x"
    assert noted == ["sending", (200, "")]


@pytest.mark.parametrize("dialect", [Anthropic(), Completions()])
def test_a_stream_that_waits_sends_signs_of_life_and_then_all(dialect: ChatDialect) -> None:
    (start, *rest), noted = send(dialect, after_s=0.07, stream=True)
    assert start["status"] == 200 and dict(start["headers"])[b"content-type"] == b"text/event-stream"
    assert [message["body"] for message in rest[:2]] == [dialect.keep_alive] * 2 and rest[-1]["more_body"] is False
    assert rest[-1]["body"] == b"".join(dialect.events(ChatRequest((), stream=True), ANSWER)) and noted[-1] == (200, "")


def test_an_error_sets_the_status_unless_the_stream_has_begun() -> None:
    (start, body), noted = send(Anthropic(), fails=True, stream=True)
    assert start["status"] == 503 and (b"retry-after", b"2") in start["headers"]
    assert json.loads(body["body"])["error"]["message"] == "it died"
    assert noted == [(503, "it died")]
    (start, *_, last), noted = send(Anthropic(), fails=True, stream=True, after_s=0.05)
    assert start["status"] == 200 and last["body"].startswith(b"event: error") and noted == [(503, "it died")]


@pytest.mark.parametrize("stream", [True, False])
def test_the_work_for_a_client_that_has_gone_ends(stream: bool) -> None:
    sent, noted = send(Completions(), after_s=9.0, stream=stream, leaves_after_s=0.05)
    assert noted == [(GONE, "the client went away before it was answered"), "cancelled"]
    assert all(message["type"] == "http.response.start" or message["body"] == Completions.keep_alive for message in sent)
