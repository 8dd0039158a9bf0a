"""The engine's endpoints for chats: chat completions, Responses and Messages, with tools. Used by `server`.

Chat completions without tools answer with the model's text as it is, and stream it token by token. All other answers are read as a whole,
because only then is it known what is a call; their streams begin with comments while the model writes.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import cached_property

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from offbeat.chat.anthropic import Anthropic
from offbeat.chat.completions import Completions
from offbeat.chat.dialects import Dialect, read_body
from offbeat.chat.messages import ChatAnswer, ChatRequest, Finish, Message, Reply
from offbeat.chat.parsing import AnswerParser
from offbeat.chat.rendering import Renderer
from offbeat.chat.responses import Responses
from offbeat.engine.answers import Answer, ChatFormat, token_logprobs, told_ids
from offbeat.engine.engine import Engine
from offbeat.engine.request import Output, Request
from offbeat.engine.text import cut_at_stop
from offbeat.engine.web import OPENAI, Disconnected, Handler, WriteError, json_answer
from offbeat.engine.wire import ChatExtras, GenerateBody, body_of
from offbeat.errors import EngineError

Outputs = Callable[[HttpRequest, Request], AsyncGenerator[Output]]
KEEP_ALIVE_S = 5.0
"""Seconds of silence after which a stream that waits sends a comment; clients and proxies wait longer."""

_ANTHROPIC = Anthropic()


class Chats:
    """Answers chats with an engine."""

    def __init__(self, engine: Engine, outputs: Outputs, adapter_of: Callable[[str], str], *, model_name: str) -> None:
        """Serve chats.

        Args:
            outputs: runs a request.
            adapter_of: gives the adapter that a request's `model` names; empty for the model itself.
        """
        self._engine = engine
        self._outputs = outputs
        self._adapter_of = adapter_of
        self._model_name = model_name

    @cached_property
    def _renderer(self) -> Renderer:  # late, because a model without a chat template serves all but chats
        return Renderer(self._engine.tokenizer)

    @cached_property
    def _parser(self) -> AnswerParser:
        return AnswerParser(self._renderer)

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and handler of each endpoint."""
        return [
            ("POST", "/v1/chat/completions", lambda http: self._answer(http, Completions())),
            ("POST", "/v1/responses", lambda http: self._answer(http, Responses())),
            ("POST", "/v1/messages", lambda http: self._answer(http, _ANTHROPIC)),
            ("POST", "/v1/messages/count_tokens", self._count),
        ]

    async def _count(self, http: HttpRequest) -> Response:
        asked = _ANTHROPIC.read_count(await http.body())
        return json_answer(_ANTHROPIC.count(len(self._renderer.prompt(asked.messages, asked.tools))))

    async def _answer(self, http: HttpRequest, dialect: Dialect) -> Response:
        data = await http.body()
        asked, extras = dialect.read(data), read_body(ChatExtras, data)
        opening = self._renderer.opening(asked.tool_choice, _only_tool(asked))
        prompt = self._renderer.prompt(asked.messages, asked.tools, opening=opening)
        rest = max(self._engine.max_context - len(prompt), 1)
        if isinstance(dialect, Anthropic) and asked.max_new_tokens is not None:
            # The field is obligatory there, so clients fill in what their largest model may write.
            asked = replace(asked, max_new_tokens=min(asked.max_new_tokens, rest))
        body = body_of(asked, extras, stops=(*asked.stop, *self._end_of_call(asked)), stream=asked.stream)
        body.stop_token_ids = [*(body.stop_token_ids or ()), *self._ends(asked, ignore_eos=body.ignore_eos)]
        adapter = self._adapter_of(asked.model)
        params = body.params(default_max_tokens=rest)
        request = Request(id=uuid.uuid4().hex, prompt=prompt, params=params, n=asked.n, adapter=adapter, stream=asked.stream)
        model, outputs = adapter or self._model_name, self._outputs(http, request)
        if asked.stream and isinstance(dialect, Completions) and not asked.tools:
            form = ChatFormat()
            name = f"{form.prefix}-{request.id}"
            told = Answer(name, form, body, tokenizer=self._engine.tokenizer, model=model, prompt_len=len(prompt))
            return await streaming(told, outputs)

        def answer(made: Sequence[Output]) -> ChatAnswer:
            parses = bool(asked.tools) or not isinstance(dialect, Completions)
            replies = tuple(self._reply(output, asked, body, opening, parses=parses) for output in _joined(made))
            prompt_ids = tuple(prompt) if asked.return_token_ids else ()
            return ChatAnswer(request.id, int(time.time()), model, replies, num_prompt_tokens=len(prompt), prompt_ids=prompt_ids)

        if not asked.stream:
            return json_answer(dialect.whole(asked, answer([output async for output in outputs])))
        first = await anext(outputs)  # a refusal must be able to set the status
        return StreamingResponse(_buffered(dialect, asked, first, outputs, answer), media_type="text/event-stream")

    def _ends(self, asked: ChatRequest, *, ignore_eos: bool) -> list[int]:
        """Return the tokens that end an answer: that of the template's turns, and those that the client names as text, which has none."""
        tokenizer = self._engine.tokenizer
        named = [tokenizer.special_id(text) for text in asked.stop]
        turn = None if ignore_eos else tokenizer.end_of_turn_id
        return [token for token in (turn, *named) if token is not None]

    def _end_of_call(self, asked: ChatRequest) -> tuple[str, ...]:
        """Return what ends the first call, if there is to be no second."""
        form = self._renderer.format
        return (form.end,) if not asked.parallel_calls and asked.tools and form is not None and form.end else ()

    def _reply(self, output: Output, asked: ChatRequest, body: GenerateBody, opening: str, *, parses: bool) -> Reply:
        """Read a sample; without parsing, its text is the answer as it is."""
        tokenizer, ids = self._engine.tokenizer, told_ids(output, body)
        message, malformed, stop = Message("assistant"), "", ""
        if parses:
            text = tokenizer.decode(self._without_end(ids, output), skip_special_tokens=False)
            text, stop = _cut(text, asked.stop, self._end_of_call(asked))
            tools = () if asked.tool_choice == "none" else asked.tools
            parsed = self._parser.parse(text, tools, opening=opening, call_ids=lambda: f"call_{uuid.uuid4().hex[:24]}")
            message, malformed = parsed.message, parsed.malformed
            message = message if asked.parallel_calls else replace(message, calls=message.calls[:1])
        else:
            text, stop = _cut(tokenizer.decode(ids), asked.stop, ())
            message = Message("assistant", text)
        assert output.finish_reason is not None, "the sample is done"
        finish: Finish = "tool_calls" if message.calls else output.finish_reason
        return Reply(
            message, finish, stop=stop, num_tokens=len(output.token_ids), malformed=malformed,
            logprobs=tuple(token_logprobs(output, tokenizer)) if asked.logprobs else (),
            token_ids=tuple(output.token_ids) if asked.return_token_ids else (),
            versions=tuple(output.versions) if asked.return_token_ids else ())

    def _without_end(self, ids: list[int], output: Output) -> list[int]:
        ends = (self._engine.tokenizer.eos_token_id, *self._renderer.end_of_turn)
        return ids[:-1] if output.finish_reason == "stop" and ids and ids[-1] in ends else ids


def errors_of(path: str) -> WriteError:
    """Return how errors of an endpoint are written."""
    return _ANTHROPIC.error if path.startswith("/v1/messages") else OPENAI


async def streaming(answer: Answer, outputs: AsyncGenerator[Output]) -> Response:
    """Send outputs as they come. Waits for the first before it sends headers, because a refusal must be able to set the status."""
    first = await anext(outputs)

    async def stream() -> AsyncIterator[bytes]:
        try:
            yield answer.piece(first)
            async for output in outputs:
                yield answer.piece(output)
            yield answer.ending()
        except EngineError as exc:
            yield Completions().stream_error(str(exc), status=500)
        except Disconnected:
            return
        finally:
            await outputs.aclose()

    return StreamingResponse(stream(), media_type="text/event-stream")


async def _buffered(
    dialect: Dialect, asked: ChatRequest, first: Output, outputs: AsyncGenerator[Output], answer: Callable[[Sequence[Output]], ChatAnswer]
) -> AsyncIterator[bytes]:
    """Send comments until all outputs are there, then the answer."""
    rest = asyncio.create_task(_all(outputs), name="outputs of a chat")
    try:
        while not (await asyncio.wait({rest}, timeout=KEEP_ALIVE_S))[0]:
            yield dialect.keep_alive
        for event in dialect.events(asked, answer([first, *rest.result()])):
            yield event
    except EngineError as exc:
        yield dialect.stream_error(str(exc), status=500)
    except Disconnected:
        return
    finally:
        rest.cancel()


async def _all(outputs: AsyncGenerator[Output]) -> list[Output]:
    try:
        return [output async for output in outputs]
    finally:
        await outputs.aclose()


def _joined(outputs: Sequence[Output]) -> list[Output]:
    """Join the outputs of each sample, in the order of samples."""
    joined: dict[int, Output] = {}
    for new in outputs:
        old = joined.get(new.index)
        joined[new.index] = new if old is None else replace(
            new, token_ids=old.token_ids + new.token_ids, logprobs=old.logprobs + new.logprobs, versions=old.versions + new.versions)
    return [joined[index] for index in sorted(joined)]


def _cut(text: str, stops: tuple[str, ...], ends: tuple[str, ...]) -> tuple[str, str]:
    """Cut a text at the first stop string, or behind what ended its only call; returns it and the stop string."""
    whole, text = text, cut_at_stop(text, (*stops, *ends))
    rest = whole[len(text) :]
    if end := next((end for end in ends if rest.startswith(end)), ""):
        return text + end, ""
    return text, next((stop for stop in stops if rest.startswith(stop)), "") if rest else ""


def _only_tool(asked: ChatRequest) -> str:
    """Return the name of the tool that has to be called: the one that is named, or the only one."""
    return asked.tool_name or (asked.tools[0].name if len(asked.tools) == 1 else "")
