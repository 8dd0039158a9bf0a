"""Chat completions, OpenAI's first API and the one that most others imitate: POST /v1/chat/completions."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from offbeat.chat.dialects import (
    COMMENT,
    AnswerStream,
    ChatDialect,
    ContentPart,
    Wishes,
    call_of,
    choice_of,
    content_of,
    data,
    named,
    openai_error,
    read_fields,
    text_of,
    tool_of,
    tools_wanted,
)
from offbeat.chat.image_parts import ImageRules
from offbeat.chat.messages import ChatAnswer, ChatRequest, Message, Piece, Reply, Role, Said, TokenLogprob, Tool
from offbeat.config.data import RENDERED
from offbeat.errors import RefusedError

DONE = b"data: [DONE]\n\n"
_MAX_KWARGS_CHARS = 1 << 14
_ROLES: dict[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool", "function": "tool"}


class _Called(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _Called | None = None
    id: str = ""
    type: str = "function"


class _CompletionsMessage(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    refusal: str | None = None
    audio: Any = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Called | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # some clients send an object of their own


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _CompletionsTool(msgspec.Struct):
    type: str = "function"
    function: _Function | None = None


class _Options(msgspec.Struct):
    include_usage: bool | None = None


class _CompletionsBody(Wishes, kw_only=True):
    messages: list[_CompletionsMessage]
    tools: list[_CompletionsTool] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    logprobs: bool | int | None = None
    stream_options: _Options | None = None
    return_token_ids: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Completions(ChatDialect):
    """The dialect of /v1/chat/completions."""

    keep_alive = COMMENT
    always_parsed = False

    def read(self, body: bytes) -> ChatRequest:
        got = read_fields(_CompletionsBody, body, api="chat completions", surface=self._surface)
        wanted = tools_wanted(map(_tool, got.tools or ()), choice_of(got.tool_choice, below="function"))
        if got.n is not None and got.n < 1:
            raise RefusedError(f"n must be >= 1, got {got.n}")
        return ChatRequest(
            messages=_messages(got.messages, self._rules),
            **wanted,
            max_new_tokens=got.max_completion_tokens if got.max_tokens is None else got.max_tokens,
            n=got.n or 1,
            logprobs=(got.logprobs is not None and got.logprobs is not False) or bool(got.top_logprobs),
            include_usage=got.stream_options is not None and bool(got.stream_options.include_usage),
            return_token_ids=bool(got.return_token_ids),
            template_kwargs=_template_kwargs(got.chat_template_kwargs or {}),
            effort=got.reasoning_effort or "",
            **got.wanted(),
        )

    def whole(self, request: ChatRequest, answer: ChatAnswer) -> bytes:  # noqa: ARG002
        choices = [
            {"index": index, "message": message_of(reply.message), "finish_reason": reply.finish, "logprobs": _logprobs(reply.logprobs),
             **_ids(reply)}
            for index, reply in enumerate(answer.replies)
        ]
        told = {**_head(answer), "object": "chat.completion", "choices": choices, "usage": _usage(answer)}
        return msgspec.json.encode({**told, "prompt_token_ids": answer.prompt_ids} if answer.prompt_ids else told)

    def stream(self, request: ChatRequest, begun: ChatAnswer) -> AnswerStream:
        return _CompletionsStream(request, begun)

    def stream_error(self, message: str, *, status: int) -> bytes:
        return data(openai_error(message, status=status))


def message_of(message: Message) -> dict[str, Any]:
    """Write an assistant's message."""
    written: dict[str, Any] = {"role": "assistant", "content": message.content or (None if message.calls else "")}
    if message.reasoning:
        written["reasoning_content"] = message.reasoning
    if message.calls:
        written["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in message.calls]
    return written


def usage_of(prompt: int, generated: int, *, num_cached: int) -> dict[str, Any]:
    """Write the numbers of tokens; `num_cached` of the prompt's were not computed, because an earlier prompt began with them."""
    return {
        "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": num_cached}}


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    generated = sum(reply.num_tokens for reply in answer.replies)
    return usage_of(answer.num_prompt_tokens, generated, num_cached=answer.num_cached_tokens)


def _head(answer: ChatAnswer) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "created": answer.created, "model": answer.model}


class _CompletionsStream:
    """Writes an answer in chunks. A chunk has the log-probabilities of all tokens since the last one of its reply."""

    def __init__(self, request: ChatRequest, begun: ChatAnswer) -> None:
        self._request = request
        self._head = {**_head(begun), "object": "chat.completion.chunk", **({"usage": None} if request.include_usage else {})}
        self._begun: set[int] = set()
        self._num_calls: dict[int, int] = {}
        self._logprobs: dict[int, list[TokenLogprob]] = {}

    def begin(self) -> bytes:
        return b""

    def pieces(self, index: int, pieces: Sequence[Piece], logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        self._logprobs.setdefault(index, []).extend(logprobs)
        return b"".join(self._chunk(index, delta) for piece in pieces for delta in self._deltas(index, piece))

    def close(self, index: int, reply: Reply) -> bytes:
        begun = b"" if index in self._begun else self._chunk(index, {"role": "assistant", "content": ""})
        return begun + self._chunk(index, {}, finish_reason=reply.finish, **_ids(reply))

    def end(self, answer: ChatAnswer) -> bytes:
        return (data({**self._head, "choices": [], "usage": _usage(answer)}) if self._request.include_usage else b"") + DONE

    def error(self, message: str, *, status: int) -> bytes:
        return data(openai_error(message, status=status))

    def _deltas(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        is_content = isinstance(piece, Said) and piece.kind == "content"
        if index not in self._begun:
            self._begun.add(index)
            yield {"role": "assistant", "content": "" if is_content else None}
        if isinstance(piece, Said):
            yield {"content" if is_content else "reasoning_content": piece.text}
            return
        at = self._num_calls.get(index, 0)
        self._num_calls[index] = at + 1
        yield {"tool_calls": [{"index": at, "id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}]}
        yield {"tool_calls": [{"index": at, "function": {"arguments": piece.arguments}}]}

    def _chunk(self, index: int, delta: dict[str, Any], *, finish_reason: str | None = None, **more: Any) -> bytes:
        logprobs = _logprobs(self._logprobs.pop(index, []))
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs, **more}
        return data({**self._head, "choices": [choice]})


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    return {"content": list(map(told_logprob, tokens))} if tokens else None


def told_logprob(token: TokenLogprob) -> dict[str, Any]:
    """Return the entry of one token among `logprobs`; clients refuse one that lacks any of these."""
    top = [{"token": likely.text, "logprob": likely.logprob, "bytes": list(likely.data)} for likely in token.top]
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data), "top_logprobs": top}


def _ids(reply: Reply) -> dict[str, Any]:
    return {"token_ids": reply.token_ids, "versions": reply.versions} if reply.token_ids else {}


def _template_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    if taken := next((name for name in given if name in RENDERED), ""):
        raise RefusedError(
            f"chat_template_kwargs must not hold {taken!r}, which the template is given anyway or never; leave it out",
            param="chat_template_kwargs")
    if (size := len(msgspec.json.encode(given))) > _MAX_KWARGS_CHARS:
        raise RefusedError(
            f"chat_template_kwargs may have {_MAX_KWARGS_CHARS} bytes, got {size}; put texts into messages", param="chat_template_kwargs")
    return given


def _messages(got: list[_CompletionsMessage], rules: ImageRules) -> tuple[Message, ...]:
    if not got:
        raise RefusedError("messages is empty; it needs at least one message", param="messages")
    return named([_message(message, f"messages[{at}]", rules) for at, message in enumerate(got)])


def _message(got: _CompletionsMessage, where: str, rules: ImageRules) -> Message:
    role = _ROLES.get(got.role)
    if role is None:
        raise RefusedError(f"{where}.role must be one of {', '.join(_ROLES)}, got {got.role!r}")
    if role in ("user", "tool"):
        shown, name = content_of(got.content, f"{where}.content", rules), got.name or ""
        call_id = got.tool_call_id or name if role == "tool" else ""
        return Message(role, shown.text, call_id=call_id, name=name, images=shown.images)
    content = text_of(got.content, f"{where}.content")
    if role != "assistant":
        return Message(role, content, name=got.name or "")
    if got.audio is not None:
        raise RefusedError(f"{where}.audio refers to an answer in sound, and models here read text alone; send its transcript as content")
    for call in got.tool_calls or ():
        if call.function is None:
            raise RefusedError(f"{where} has a call of type {call.type!r}; only functions can be called")
    called = [(c.id, c.function) for c in got.tool_calls or () if c.function is not None]
    if got.function_call is not None:  # the older form, whose result names the function in place of an id
        called.append((got.function_call.name, got.function_call))
    calls = tuple(call_of(call_id, function.name, function.arguments, where) for call_id, function in called)
    reasoning = got.reasoning_content or (got.reasoning if isinstance(got.reasoning, str) else "")
    return Message("assistant", content or got.refusal or "", calls, name=got.name or "", reasoning=reasoning)


def _tool(got: _CompletionsTool) -> Tool:
    if got.type != "function" or got.function is None:
        raise RefusedError(f"tools has one of type {got.type!r}; only functions, which the client runs itself, can be offered")
    return tool_of(got.function.name, got.function.description, got.function.parameters, strict=got.function.strict)
