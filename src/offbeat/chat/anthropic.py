"""Messages, Anthropic's API: POST /v1/messages, and /v1/messages/count_tokens, which only counts.

Its messages consist of blocks: results of tools are blocks of the user's messages, and become messages of their own here.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from offbeat.chat.dialects import AnswerStream, ChatDialect, call_of, event, extras_of, named, read_fields, tool_of, tools_wanted
from offbeat.chat.image_parts import ImageRules, join_parts
from offbeat.chat.messages import ChatAnswer, ChatRequest, Message, Piece, Reply, Said, SaidKind, TokenLogprob, Tool, ToolCall
from offbeat.chat.shaping import ShapingFields, Structure, structure_of
from offbeat.data.image_sources import PART_KINDS, ImageSource
from offbeat.errors import RefusedError

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "pause_turn"}
_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class _Block(msgspec.Struct):
    type: str = "text"
    text: str | None = None
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str = ""
    content: "str | list[_Block] | None" = None
    is_error: bool | None = None
    thinking: str | None = None
    source: dict[str, Any] | None = None


_Content = str | list[_Block] | None


class _AnthropicMessage(msgspec.Struct):
    role: str
    content: _Content = None


class _AnthropicTool(msgspec.Struct):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class _AnthropicChoice(msgspec.Struct):
    type: str = "auto"
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class _OutputConfig(msgspec.Struct):
    format: dict[str, Any] | None = None
    effort: str | None = None


class _Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]


class _AnthropicBody(msgspec.Struct):
    messages: list[_AnthropicMessage]
    model: str | None = None
    max_tokens: int | None = None
    system: _Content = None
    tools: list[_AnthropicTool] | None = None
    tool_choice: _AnthropicChoice | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    output_format: dict[str, Any] | None = None
    output_config: _OutputConfig | None = None
    thinking: _Thinking | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    scaled_logprobs: bool | None = None


class Anthropic(ChatDialect):
    """The dialect of /v1/messages."""

    keep_alive = event({"type": "ping"})
    always_parsed = True

    def read(self, body: bytes) -> ChatRequest:
        got = read_fields(_AnthropicBody, body, api="Messages", surface=self._surface)
        wanted = tools_wanted(map(_tool, got.tools or ()), _choice(got.tool_choice))
        messages = _messages(got, self._rules)
        if not messages:
            raise RefusedError("messages is empty; it needs at least one message with content")
        if messages[-1].role == "assistant":
            raise RefusedError("the last of messages is the assistant's, and a begun answer is not continued here; end with the user's")
        return ChatRequest(
            messages=messages,
            **wanted,
            parallel_calls=got.tool_choice is None or not got.tool_choice.disable_parallel_tool_use,
            model=got.model or "",
            max_new_tokens=got.max_tokens,
            temperature=got.temperature, top_p=got.top_p, top_k=got.top_k,
            stop=tuple(got.stop_sequences or ()),
            stream=bool(got.stream),
            effort=(got.output_config.effort if got.output_config is not None else None) or "",
            thinks={"enabled": True, "disabled": False}.get(got.thinking.type) if got.thinking is not None else None,
            shaping=ShapingFields().shaping(structure=_structure(got)),
            **extras_of(got),
        )

    def count(self, num_tokens: int) -> bytes:
        """Write the answer to a request to count its tokens, which `read` reads as well."""
        return msgspec.json.encode({"input_tokens": num_tokens})

    def whole(self, request: ChatRequest, answer: ChatAnswer) -> bytes:  # noqa: ARG002
        reply = answer.replies[0]
        usage = _usage(answer, reply.num_tokens)
        return msgspec.json.encode({**_head(answer), "content": _blocks(reply.message), **_ending(reply), "usage": usage})

    def stream(self, request: ChatRequest, begun: ChatAnswer) -> AnswerStream:  # noqa: ARG002
        return _AnthropicStream(begun)

    def error(self, message: str, *, status: int, param: str = "") -> bytes:  # noqa: ARG002 (its form has no place for it)
        return msgspec.json.encode(_error(message, status))

    def stream_error(self, message: str, *, status: int) -> bytes:
        return event(_error(message, status))


def _structure(got: _AnthropicBody) -> Structure | None:
    config = got.output_config.format if got.output_config is not None else None
    return structure_of(config, "output_config.format") or structure_of(got.output_format, "output_format")


def _messages(got: _AnthropicBody, rules: ImageRules) -> tuple[Message, ...]:
    system = _text_of(got.system, "system")
    messages = [Message("system", system)] if system else []
    for at, message in enumerate(got.messages):
        where = f"messages[{at}].content"
        if message.role == "assistant":
            messages.append(_assistant(_blocks_of(message.content), where))
        elif message.role == "user":
            messages += _user(_blocks_of(message.content), where, rules)
        elif message.role == "system":
            messages.append(Message("system", _text_of(message.content, where)))
        else:
            raise RefusedError(f"messages[{at}].role must be 'user' or 'assistant', got {message.role!r}")
    return named(messages)


def _blocks_of(content: _Content) -> Sequence[_Block]:
    return [_Block(text=content)] if isinstance(content, str) else content or ()


def _text_of(content: _Content, where: str) -> str:
    return "\n".join(_text_of_block(block, where, why="only messages of users have images") for block in _blocks_of(content))


def _text_of_block(block: _Block, where: str, *, why: str) -> str:
    if block.type != "text":
        why = why if block.type in PART_KINDS else "models here read text alone"
        raise RefusedError(f"{where} has a block of type {block.type!r}, and {why}; leave it out")
    return block.text or ""


def _part_of(block: _Block, where: str, rules: ImageRules) -> str | ImageSource:
    """Return the text of a block, or its image."""
    if block.type not in PART_KINDS:
        return _text_of_block(block, where, why="models here read text alone")
    source, where = block.source or {}, f"{where}, a block of type {block.type!r},"
    if source.get("type") == "base64":
        return rules.source_of_base64(source.get("data"), where)
    if source.get("type") == "url":
        return rules.source_of(source.get("url"), where)
    raise RefusedError(f"{where} must have a source of type 'base64' or 'url', got {source.get('type')!r}; send the file in base64")


def _assistant(blocks: Sequence[_Block], where: str) -> Message:
    texts: list[str] = []
    calls, thoughts = [], []
    for block in blocks:
        if block.type == "tool_use":
            calls.append(call_of(block.id, block.name, block.input, where))
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type != "redacted_thinking":
            # Text behind a call goes on from the text before it.
            texts += ["\n"] if texts and not calls else []
            texts.append(_text_of([block], where))
    return Message("assistant", "".join(texts), tuple(calls), reasoning="\n".join(thoughts))


def _user(blocks: Sequence[_Block], where: str, rules: ImageRules) -> Iterator[Message]:
    """Yield the results of tools, in their order, and then the user's text and images."""
    parts: list[str | ImageSource] = []
    for block in blocks:
        if block.type == "tool_result":
            shown = join_parts([_part_of(inner, where, rules) for inner in _blocks_of(block.content)], where)
            text = f"Error: {shown.text}" if block.is_error else shown.text  # templates have no place for the mark of an error
            yield Message("tool", text, call_id=block.tool_use_id, images=shown.images)
        else:
            parts.append(_part_of(block, where, rules))
    if parts:
        shown = join_parts(parts, where)
        yield Message("user", shown.text, images=shown.images)


def _tool(got: _AnthropicTool) -> Tool:
    if got.type not in (None, "custom"):
        raise RefusedError(f"tools has one of type {got.type!r}, and nothing is built in here; only tools that the client runs itself")
    return tool_of(got.name, got.description, got.input_schema, strict=got.strict)


def _choice(got: _AnthropicChoice | None) -> tuple[str, str]:
    if got is None:
        return "auto", ""
    if got.type == "tool":
        return "required", got.name
    return {"any": "required"}.get(got.type, got.type), ""


def _head(answer: ChatAnswer) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}


def _ending(reply: Reply) -> dict[str, Any]:
    if reply.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop}
    return {"stop_reason": _STOP_REASONS[reply.finish], "stop_sequence": None}


def _usage(answer: ChatAnswer, num_generated: int) -> dict[str, int]:
    """Count tokens; in this API the prompt's are split into those that are computed and those that were computed before."""
    cached = answer.num_cached_tokens
    return {
        "input_tokens": answer.num_prompt_tokens - cached, "output_tokens": num_generated, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached}


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not message.calls:
        blocks.append({"type": "text", "text": message.content})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": msgspec.json.decode(call.arguments)} for call in message.calls]
    return blocks


class _AnthropicStream:
    """Writes an answer in blocks, each of which ends before the next begins. Text behind a call is a block of its own."""

    def __init__(self, begun: ChatAnswer) -> None:
        self._answer = begun
        self._index = 0
        self._open: SaidKind | None = None
        self._has_answered = False  # with text or a call

    def begin(self) -> bytes:
        message = {**_head(self._answer), "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(self._answer, 0)}
        return event({"type": "message_start", "message": message})

    def pieces(self, index: int, pieces: Sequence[Piece], logprobs: Sequence[TokenLogprob] = ()) -> bytes:  # noqa: ARG002
        return b"".join(self._said(piece) if isinstance(piece, Said) else self._write_call(piece) for piece in pieces)

    def close(self, index: int, reply: Reply) -> bytes:  # noqa: ARG002
        empty = b"" if self._has_answered else self._begin_block("content")
        return empty + self._end_block()

    def end(self, answer: ChatAnswer) -> bytes:
        reply = answer.replies[0]
        return event({"type": "message_delta", "delta": _ending(reply), "usage": {"output_tokens": reply.num_tokens}}) + event(
            {"type": "message_stop"})

    def error(self, message: str, *, status: int) -> bytes:
        return event(_error(message, status))

    def _said(self, piece: Said) -> bytes:
        begun = b"" if self._open == piece.kind else self._begin_block(piece.kind)
        delta = (
            {"type": "text_delta", "text": piece.text} if piece.kind == "content" else
            {"type": "thinking_delta", "thinking": piece.text})
        return begun + self._delta(delta)

    def _write_call(self, call: ToolCall) -> bytes:
        ended = self._end_block()
        self._has_answered = True
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        told = [
            event({"type": "content_block_start", "index": self._index, "content_block": block}),
            self._delta({"type": "input_json_delta", "partial_json": call.arguments}),
            event({"type": "content_block_stop", "index": self._index})]
        self._index += 1
        return ended + b"".join(told)

    def _begin_block(self, kind: SaidKind) -> bytes:
        ended, self._open = self._end_block(), kind
        self._has_answered = self._has_answered or kind == "content"
        block = {"type": "text", "text": ""} if kind == "content" else {"type": "thinking", "thinking": "", "signature": ""}
        return ended + event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _end_block(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": ""}) if self._open == "reasoning" else b""
        told = signed + event({"type": "content_block_stop", "index": self._index})
        self._index, self._open = self._index + 1, None
        return told

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": self._index, "delta": delta})


def _error(message: str, status: int) -> dict[str, Any]:
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
