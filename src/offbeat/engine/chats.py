"""The engine's endpoints for chats: chat completions, Responses and Messages, with tools. Used by `server`.

Chat completions without tools answer with the model's text as it is. All other answers are sent in parts: reasoning, text and calls.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from offbeat.chat.answering import Answering, Chat, answer_of
from offbeat.chat.anthropic import Anthropic
from offbeat.chat.completions import Completions
from offbeat.chat.dialects import ChatDialect
from offbeat.chat.messages import ChatAnswer
from offbeat.chat.refusals import json_response
from offbeat.chat.responses import Responses
from offbeat.chat.sending import ChatResponse
from offbeat.chat.size import check_chat_size
from offbeat.engine.answers import Answer, ChatFormat
from offbeat.engine.chat_streams import ChatEvents, stream_chat
from offbeat.engine.engine import EmbeddedEngine
from offbeat.engine.request import Output, Request
from offbeat.engine.served_models import ServedModels
from offbeat.engine.submissions import Submissions
from offbeat.engine.web import Disconnected, Handler, refusal_of, whole_body
from offbeat.engine.wire import body_of
from offbeat.errors import EngineError
from offbeat.listening import decode_body


class Chats:
    """Answers chats with an engine."""

    def __init__(self, engine: EmbeddedEngine, submissions: Submissions, models: ServedModels, *, image_files: Path | None = None) -> None:
        """`image_files` is the folder that paths of images may lead to; None refuses paths."""
        self._engine = engine
        self._completions, self._responses = Completions(image_files=image_files), Responses(image_files=image_files)
        self._anthropic = Anthropic(image_files=image_files)
        self._submissions = submissions
        self._models = models

    @cached_property
    def _answering(self) -> Answering:  # late, because a model without a chat template serves all but chats
        return Answering.of(self._engine.tokenizer)

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and handler of each endpoint."""
        return [
            ("POST", "/v1/chat/completions", lambda http: self._answer(http, self._completions)),
            ("POST", "/v1/responses", lambda http: self._answer(http, self._responses)),
            ("POST", "/v1/messages", lambda http: self._answer(http, self._anthropic)),
            ("POST", "/v1/messages/count_tokens", self._count),
        ]

    async def _count(self, http: HttpRequest) -> Response:
        asked = await decode_body(self._anthropic.read, await whole_body(http))
        check_chat_size(asked, self._engine.tokenizer, context=self._engine.max_context)
        return json_response(self._anthropic.count(await asyncio.to_thread(self._answering.count, asked)))

    async def _answer(self, http: HttpRequest, dialect: ChatDialect) -> Response:
        asked = await decode_body(dialect.read, await whole_body(http))
        check_chat_size(asked, self._engine.tokenizer, context=self._engine.max_context)
        chat = await asyncio.to_thread(self._answering.prepare_chat, asked, dialect)
        if (structure := self._answering.strict_structure(chat)) is not None:
            asked = replace(asked, shaping=replace(asked.shaping, structure=structure))
        rest = max(self._engine.max_context - len(chat.prompt), 1)
        if isinstance(dialect, Anthropic) and asked.max_new_tokens is not None:
            # The field is obligatory there, so clients fill in the limit of their largest model.
            asked = replace(asked, max_new_tokens=min(asked.max_new_tokens, rest))
        body = body_of(asked, stops=chat.stops, stop_token_ids=self._ends(chat), stream=asked.stream)
        adapter = self._models.adapter_of(asked.model)
        params = body.params(default_max_tokens=rest)
        request = Request(id=uuid.uuid4().hex, prompt=list(chat.prompt), params=params, n=asked.n, adapter=adapter, stream=asked.stream)
        model, outputs = adapter or self._models.own_name, self._submissions.outputs(http, request)
        if asked.stream and not chat.plain:
            events = ChatEvents(replace(chat, request=asked), self._answering, dialect, self._engine.tokenizer, model=model)
            return await stream_chat(events, outputs, keep_alive=dialect.keep_alive)
        if asked.stream:
            form = ChatFormat()
            name = f"{form.prefix}-{request.id}"
            told = Answer(name, form, body, tokenizer=self._engine.tokenizer, model=model, prompt_len=len(chat.prompt))
            return await streaming(told, outputs)

        async def answer_chat() -> ChatAnswer:
            async with aclosing(outputs):
                made = [output async for output in outputs]
            made.sort(key=lambda output: output.index)
            replies = await asyncio.to_thread(lambda: [self._answering.reply(chat, output) for output in made])
            return answer_of(asked, chat.prompt, replies, model=model, num_cached_tokens=made[0].num_cached)

        return ChatResponse(asyncio.create_task(answer_chat(), name=f"chat {request.id}"), dialect, asked, explain=refusal_of)

    def _ends(self, chat: Chat) -> list[int]:
        """Return the tokens that end an answer besides the tokenizer's own: the end of a turn, and the client's stop tokens."""
        turn = None if chat.request.ignore_eos else self._engine.tokenizer.end_of_turn_id
        return [*(() if turn is None else (turn,)), *chat.stop_token_ids]


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
            yield Completions().stream_error(str(exc), status=refusal_of(exc).status)
        except Disconnected:
            return
        finally:
            await outputs.aclose()

    return StreamingResponse(stream(), media_type="text/event-stream")
