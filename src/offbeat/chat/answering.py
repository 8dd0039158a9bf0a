"""From a chat to a prompt, and from samples to its answer. Used by all that serve chats: the engine, the service and the recorder.

`Answering` renders the prompt, lists the strings and tokens that end a sample, and reads samples as replies. The server generates the
samples, and sends answers by `sending`. No I/O.
"""

import json
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from offbeat.chat.dialects import ChatDialect
from offbeat.chat.messages import ChatAnswer, ChatRequest, Finish, Piece, Reply, Said, TokenLogprob
from offbeat.chat.parsing import AnswerParser, AnswerReader, message_of
from offbeat.chat.rendering import Renderer
from offbeat.chat.shaping import Structure
from offbeat.chat.strict import call_structure
from offbeat.data.ends import split_stops
from offbeat.data.tokenizer import Tokenizer
from offbeat.errors import RefusedError

_MOST_GIVEN = 16
"""Number of sets of template variables that are remembered; clients differ in few."""


class ChatSample(Protocol):
    """A sample of a model: [L] tokens with their log-probabilities and versions, the token that ended them included."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[float]: ...

    @property
    def versions(self) -> Sequence[int]: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def top_logprobs(self) -> Sequence[Sequence[tuple[int, float]]] | None: ...


@dataclass(frozen=True)
class Chat:
    """A request, prepared for sampling.

    Attributes:
        prompt: [L] token ids.
        opening: the forced beginning of the answer, such as "<tool_call>"; the prompt ends with it.
        stop: the client's strings that end a sample.
        stop_token_ids: tokens that end a sample; among them special tokens of the client's `stop`, as decoded text does not hold those.
        call_end: the text that ends the first call, e.g. "</tool_call>", where there may be no second; empty elsewhere.
        plain: give an answer as the text that was written, instead of its reasoning, text and calls.
        variables: variables of the chat template that the client sets, such as {"enable_thinking": False}.
    """

    request: ChatRequest
    prompt: Sequence[int]
    opening: str = ""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    call_end: str = ""
    plain: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stops(self) -> tuple[str, ...]:
        """All strings that end a sample."""
        return (*self.stop, self.call_end) if self.call_end else self.stop


class Answering:
    """Prepares and reads chats with one model."""

    def __init__(self, renderer: Renderer, parser: AnswerParser) -> None:
        self.renderer = renderer
        self._parser = parser
        self._tokenizer = renderer.tokenizer
        self._ends = {self._tokenizer.eos_token_id, *renderer.end_of_turn}
        self._given: dict[str, Answering] = {}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Answering":
        """Make it from a tokenizer with a chat template; errors as of `Renderer`."""
        renderer = Renderer(tokenizer)
        return cls(renderer, AnswerParser(renderer))

    def prepare_chat(self, request: ChatRequest, dialect: ChatDialect) -> Chat:
        """Render a request; errors as of `Renderer.prompt` and `Renderer.opening`."""
        variables = self._variables(request)
        renderer = self._giving(variables).renderer
        opening = renderer.opening(request.tool_choice, _only_tool(request))
        check_structure(request)
        stop, stop_token_ids = split_stops(request.stop, self._tokenizer)
        form, one_call = renderer.format, bool(request.tools) and not request.parallel_calls
        return Chat(
            request, renderer.prompt(request.messages, request.tools, opening=opening), opening, stop,
            (*stop_token_ids, *request.stop_token_ids), call_end=form.end if one_call and form is not None else "",
            plain=not (request.tools or dialect.always_parsed), variables=variables)

    def strict_structure(self, chat: Chat) -> Structure | None:
        """Return the form of a call that is forced, if its tool is strict; errors as of `call_structure`."""
        form = self._giving(chat.variables).renderer.format
        if form is None or not chat.opening:
            return None
        return call_structure(form, chat.request, tool_name=_only_tool(chat.request), special_text_in=self._tokenizer.special_text_in)

    def count(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt; errors as of `Renderer.prompt`."""
        return len(self._giving(self._variables(request)).renderer.prompt(request.messages, request.tools))

    def _variables(self, request: ChatRequest) -> dict[str, Any]:
        """Return the variables of the template that a request sets; effort and thinking count where the template reads them."""
        thinks = False if request.effort == "none" else request.thinks
        said = {"reasoning_effort": request.effort or None, "enable_thinking": thinks}
        given = {name: value for name, value in said.items() if value is not None}
        read = self._tokenizer.template_reads(with_tools=bool(request.tools)) if given else ()
        return {**{name: value for name, value in given.items() if name in read}, **request.template_kwargs}

    def _giving(self, variables: Mapping[str, Any]) -> "Answering":
        """Return the `Answering` with these variables, which may change the beginning of an answer."""
        if not variables:
            return self
        key = json.dumps(variables, sort_keys=True)
        if (found := self._given.get(key)) is None:
            if len(self._given) >= _MOST_GIVEN:
                self._given.clear()
            found = self._given[key] = Answering.of(self._tokenizer.giving(variables))
        return found

    def reply(self, chat: Chat, sample: ChatSample) -> Reply:
        """Read one whole sample. Its calls get random ids."""
        return self.reader(chat).finish(sample)[1]

    def reader(self, chat: Chat) -> "ReplyReader":
        """Return a reader of one sample that grows."""
        tools = () if chat.request.tool_choice == "none" else chat.request.tools
        reader = None if chat.plain else self._giving(chat.variables)._parser.reader(tools, call_ids=_call_id)
        return ReplyReader(chat, reader, self._tokenizer, ends=self._ends)


class ReplyReader:
    """Reads one sample as it grows. The pieces of a reply, put together, are its message."""

    def __init__(self, chat: Chat, reader: AnswerReader | None, tokenizer: Tokenizer, *, ends: Collection[int]) -> None:
        """`reader` splits an answer into its parts; None gives the text as it was written. `ends` are tokens beside the chat's own."""
        self._chat, self._reader, self._tokenizer, self._ends = chat, reader, tokenizer, ends
        self._told: list[Piece] = []
        self._num_read = 0
        self._has_called = False
        self._begun = [] if reader is None else reader.feed(chat.opening)

    def push(self, text: str) -> list[Piece]:
        """Read more of a sample; its later tokens do not change the text so far."""
        self._num_read += len(text)
        if self._reader is not None:
            return self._tell(self._reader.feed(text))
        return self._tell([Said("content", text)] if text else [])

    def finish(self, sample: ChatSample) -> tuple[list[Piece], Reply]:
        """Read the rest of a whole sample; returns the last pieces, and the reply with all of them."""
        chat, request, ids, stop = self._chat, self._chat.request, sample.token_ids, self._chat.stop
        if sample.finish_reason != "stop":
            stop = ()
        elif ids and (ids[-1] in self._ends or ids[-1] in chat.stop_token_ids):
            ids, stop = ids[:-1], ()
        free = self._tokenizer.decode_continuation(ids[: request.shaping.min_tokens], skip_special_tokens=chat.plain)
        text, stopped = _cut(self._tokenizer.decode_continuation(ids, skip_special_tokens=chat.plain), stop, chat.call_end, after=len(free))
        last = self.push(text[self._num_read :])
        if self._reader is not None:
            last += self._tell(self._reader.finish())
        message = message_of(self._told)
        finish: Finish = "tool_calls" if message.calls else sample.finish_reason  # type: ignore[reportAssignmentType]
        return last, Reply(
            message, finish, stop=stopped, num_tokens=len(sample.token_ids),
            malformed=self._reader.malformed if self._reader is not None else "",
            logprobs=token_logprobs(sample, self._tokenizer) if request.logprobs else (),
            token_ids=tuple(sample.token_ids) if request.return_token_ids else (),
            versions=tuple(sample.versions) if request.return_token_ids else ())

    def _tell(self, read: Sequence[Piece]) -> list[Piece]:
        """Return the pieces `read`, after those of the opening; where parallel calls are off, only the first call."""
        told, self._begun = [*self._begun, *read], []
        if not self._chat.request.parallel_calls:
            kept: list[Piece] = []
            for piece in told:
                if isinstance(piece, Said) or not self._has_called:
                    kept.append(piece)
                self._has_called = self._has_called or not isinstance(piece, Said)
            told = kept
        self._told += told
        return told


def check_structure(request: ChatRequest) -> None:
    """Refuse a form of the text beside tools that may be called, since a call has another form."""
    if request.shaping.structure is not None and request.tools and request.tool_choice != "none":
        raise RefusedError(
            f"tools that may be called and a form of the answer, {request.shaping.structure.kind}, cannot both be kept; set tool_choice"
            " to 'none', or leave one of them out", param="tool_choice")


def answer_of(
    request: ChatRequest, prompt: Sequence[int], replies: Sequence[Reply], *, model: str, num_cached_tokens: int = 0
) -> ChatAnswer:
    """Put replies together to an answer, which gets a random id. An answer that will be streamed begins without replies."""
    return ChatAnswer(
        uuid.uuid4().hex, int(time.time()), model, tuple(replies), len(prompt),
        prompt_ids=tuple(prompt) if request.return_token_ids else (), num_cached_tokens=num_cached_tokens)


def token_logprobs(sample: ChatSample, tokenizer: Tokenizer) -> tuple[TokenLogprob, ...]:
    """Return the text, the bytes and the log-probability of each token, and the likeliest tokens in its place."""
    def told(token: int, logprob: float, top: Sequence[tuple[int, float]] = ()) -> TokenLogprob:
        text = tokenizer.decode_continuation([token], skip_special_tokens=False)
        return TokenLogprob(text, logprob, tokenizer.token_bytes(token), tuple(told(*likely) for likely in top))

    tops = sample.top_logprobs or [()] * len(sample.token_ids)
    return tuple(told(*token) for token in zip(sample.token_ids, sample.logprobs, tops, strict=True))


def _cut(text: str, stops: tuple[str, ...], end: str, *, after: int) -> tuple[str, str]:
    """Cut a text before the first stop string that ends past `after` characters, or behind its call's `end`; return text and string."""
    found = [(at, mark) for mark in (*stops, end) if mark and (at := text.find(mark, max(after - len(mark) + 1, 0))) >= 0]
    at, mark = min(found, default=(len(text), ""))
    return (text[: at + len(mark)], "") if mark == end else (text[:at], mark)


def _only_tool(request: ChatRequest) -> str:
    """Return the name of the only tool that may be called, by `tool_name` or since there is one; empty if there are several."""
    return request.tool_name or (request.tools[0].name if len(request.tools) == 1 else "")


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
