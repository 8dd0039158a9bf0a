"""Streams of chats: the outputs of a request as events of the client's API, while samples grow. Used by `chats`.

`ChatEvents` reads each sample as far as is certain and writes the new text; `stream_chat` sends it, with signs of life in the pauses. A
client that has gone ends the request, as everywhere at the engine.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field, replace

from starlette.responses import StreamingResponse

from offbeat.chat.answering import Answering, Chat, ReplyReader, answer_of, token_logprobs
from offbeat.chat.dialects import ChatDialect
from offbeat.chat.messages import Reply
from offbeat.chat.sending import KEEP_ALIVE_S
from offbeat.data.tokenizer import Tokenizer
from offbeat.engine.request import Output
from offbeat.engine.text import TextStream
from offbeat.engine.web import Disconnected, refusal_of
from offbeat.inference.sampling import TopTokens
from offbeat.types import Version


class _WithSpecialTokens:
    """Decodes a text with its special tokens, in which some formats write calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


@dataclass
class _Sample:
    """A sample as far as it has come; the fields follow `Output`."""

    reader: ReplyReader
    text: TextStream
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    top_logprobs: list[TopTokens] | None = None
    finish_reason: str | None = None

    def add(self, output: Output) -> None:
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.versions += output.versions
        if output.top_logprobs is not None:
            self.top_logprobs = [*(self.top_logprobs or ()), *output.top_logprobs]
        self.finish_reason = output.finish_reason


class ChatEvents:
    """Writes the outputs of one request as events."""

    def __init__(self, chat: Chat, answering: Answering, dialect: ChatDialect, tokenizer: Tokenizer, *, model: str) -> None:
        self._chat, self._answering, self._dialect, self._tokenizer = chat, answering, dialect, tokenizer
        self._begun = answer_of(chat.request, chat.prompt, (), model=model)
        self._stream = dialect.stream(chat.request, self._begun)
        self._has_begun = False
        self._samples: dict[int, _Sample] = {}
        self._replies: dict[int, Reply] = {}

    def piece(self, output: Output) -> bytes:
        """Return the events of an output, which may be none."""
        begun = b"" if self._has_begun else self._begin(output)
        self._has_begun = True
        sample = self._samples.get(output.index)
        if sample is None:
            sample = self._samples[output.index] = self._sample()
        sample.add(output)
        logprobs = token_logprobs(output, self._tokenizer) if self._chat.request.logprobs else ()
        if output.finish_reason is None:
            pieces = sample.reader.push("".join(map(sample.text.push, output.token_ids)))
            return begun + self._stream.pieces(output.index, pieces, logprobs)
        pieces, reply = sample.reader.finish(sample)
        del self._samples[output.index]
        self._replies[output.index] = reply
        return begun + self._stream.pieces(output.index, pieces, logprobs) + self._stream.close(output.index, reply)

    def _begin(self, first: Output) -> bytes:
        self._begun = replace(self._begun, num_cached_tokens=first.num_cached)
        self._stream = self._dialect.stream(self._chat.request, self._begun)
        return self._stream.begin()

    def ending(self) -> bytes:
        """Return the events behind the last output."""
        return self._stream.end(replace(self._begun, replies=tuple(reply for _, reply in sorted(self._replies.items()))))

    def error(self, message: str, *, status: int) -> bytes:
        return self._stream.error(message, status=status)

    def _sample(self) -> _Sample:
        chat = self._chat
        text = TextStream(
            _WithSpecialTokens(self._tokenizer), chat.stops, min_tokens=chat.request.shaping.min_tokens, after=self._tokenizer.anchor)
        return _Sample(self._answering.reader(chat), text)


async def stream_chat(
    events: ChatEvents, outputs: AsyncGenerator[Output], *, keep_alive: bytes, keep_alive_s: float = KEEP_ALIVE_S
) -> StreamingResponse:
    """Send outputs as they come. Waits a while for the first before it sends headers, because a refusal must be able to set the status."""
    following = asyncio.create_task(_next(outputs), name="output of a chat")
    try:
        done, _ = await asyncio.wait({following}, timeout=keep_alive_s)
        if done:
            following.result()
    except BaseException:
        following.cancel()
        raise
    return StreamingResponse(
        _stream(events, outputs, following, keep_alive=keep_alive, keep_alive_s=keep_alive_s), media_type="text/event-stream",
        headers={"cache-control": "no-store"})


async def _stream(
    events: ChatEvents, outputs: AsyncGenerator[Output], following: "asyncio.Task[Output | None]", *, keep_alive: bytes,
    keep_alive_s: float,
) -> AsyncIterator[bytes]:
    told_s = time.monotonic() if following.done() else -keep_alive_s  # a client that has waited as long is told so at once
    try:
        while True:
            data = keep_alive
            if (await asyncio.wait({following}, timeout=max(told_s + keep_alive_s - time.monotonic(), 0)))[0]:
                if (output := following.result()) is None:
                    break
                # The end of a sample is read again as a whole, and a long one takes a while.
                data = events.piece(output) if output.finish_reason is None else await asyncio.to_thread(events.piece, output)
                following = asyncio.create_task(_next(outputs), name="output of a chat")
            if data:
                yield data
                told_s = time.monotonic()
        yield events.ending()
    except Disconnected:
        return
    except Exception as exc:
        told = refusal_of(exc)
        yield events.error(told.sentence, status=told.status)
    finally:
        following.cancel()
        await asyncio.wait({following})
        await outputs.aclose()


async def _next(outputs: AsyncGenerator[Output]) -> Output | None:
    return await anext(outputs, None)
