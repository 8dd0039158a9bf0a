"""Responses, OpenAI's later API: POST /v1/responses. Nothing is stored, so a request holds all items of its conversation.

An answer's reasoning, text and calls are items of their own, and come back as items; `read` joins them to one message of the assistant.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from offbeat.chat.completions import told_logprob
from offbeat.chat.dialects import (
    COMMENT,
    AnswerStream,
    ChatDialect,
    ContentPart,
    Wishes,
    call_of,
    choice_of,
    content_of,
    event,
    named,
    openai_error,
    read_fields,
    text_of,
    tool_of,
    tools_wanted,
)
from offbeat.chat.image_parts import ImageRules, Shown
from offbeat.chat.messages import ChatAnswer, ChatRequest, Message, Piece, Reply, Role, Said, SaidKind, TokenLogprob, Tool, ToolCall
from offbeat.chat.shaping import structure_of
from offbeat.errors import RefusedError

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class _Item(msgspec.Struct):
    type: str = "message"
    role: str = ""
    content: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str | dict[str, Any] | None = None
    output: str | list[ContentPart] | None = None


class _ResponsesTool(msgspec.Struct):
    type: str = "function"
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Text(msgspec.Struct):
    format: dict[str, Any] | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None


class _ResponsesBody(Wishes, kw_only=True):
    input: str | list[_Item]
    instructions: str | None = None
    tools: list[_ResponsesTool] | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None


class Responses(ChatDialect):
    """The dialect of /v1/responses."""

    keep_alive = COMMENT
    always_parsed = True

    def read(self, body: bytes) -> ChatRequest:
        got = read_fields(_ResponsesBody, body, api="Responses", surface=self._surface)
        wanted = tools_wanted(map(_tool, got.tools or ()), choice_of(got.tool_choice))
        return ChatRequest(
            messages=_messages(got.input, got.instructions, self._rules),
            **wanted,
            max_new_tokens=got.max_output_tokens,
            effort=(got.reasoning.effort if got.reasoning is not None else None) or "",
            logprobs="message.output_text.logprobs" in (got.include or ()) or bool(got.top_logprobs),
            **got.wanted(structure=structure_of(got.text.format if got.text is not None else None, "text.format")),
        )

    def whole(self, request: ChatRequest, answer: ChatAnswer) -> bytes:
        return msgspec.json.encode(_response(request, answer, _items(answer), _status(answer.replies[0])))

    def stream(self, request: ChatRequest, begun: ChatAnswer) -> AnswerStream:
        return _ResponsesStream(request, begun)

    def stream_error(self, message: str, *, status: int) -> bytes:
        return event({**_error(message, status), "sequence_number": 0})


def _messages(got: str | Sequence[_Item], instructions: str | None, rules: ImageRules) -> tuple[Message, ...]:
    messages = [Message("system", instructions)] if instructions else []
    if isinstance(got, str):
        return (*messages, Message("user", got))
    if not got:
        raise RefusedError("input is empty; it needs at least one item")
    for at, item in enumerate(got):
        where = f"input[{at}]"
        if item.type == "message" and item.role != "assistant":
            if item.role not in _ROLES:
                raise RefusedError(f"{where}.role must be one of {', '.join(_ROLES)}, got {item.role!r}")
            role, place = _ROLES[item.role], f"{where}.content"
            shown = content_of(item.content, place, rules) if role == "user" else Shown(text_of(item.content, place))
            messages.append(Message(role, shown.text, images=shown.images))
        elif item.type == "function_call_output":
            shown = content_of(item.output, f"{where}.output", rules)
            messages.append(Message("tool", shown.text, call_id=item.call_id, images=shown.images))
        else:
            _add_own(messages, item, where)
    return named(messages)


def _add_own(messages: list[Message], item: _Item, where: str) -> None:
    """Add an item of the assistant's to its last message, if it can be of the same answer: reasoning comes first, then text and calls."""
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if item.type == "reasoning":
        content = item.content if item.content else item.summary
        messages.append(Message("assistant", reasoning=text_of(content, f"{where}.content")))
    elif item.type == "message":
        text = text_of(item.content, f"{where}.content")
        if last is not None and (last.calls or not last.content):  # text behind a call, too, is of the answer that called
            messages[-1] = Message("assistant", last.content + text, last.calls, reasoning=last.reasoning)
        else:
            messages.append(Message("assistant", text))
    elif item.type == "function_call":
        call = call_of(item.call_id, item.name, item.arguments, where)
        if last is not None:
            messages[-1] = Message("assistant", last.content, (*last.calls, call), reasoning=last.reasoning)
        else:
            messages.append(Message("assistant", calls=(call,)))
    else:
        raise RefusedError(
            f"{where} has the type {item.type!r}; only message, reasoning, function_call and function_call_output are understood")


def _tool(got: _ResponsesTool) -> Tool:
    if got.type != "function":
        raise RefusedError(f"tools has one of type {got.type!r}, and none is built in here; only functions, which the client runs itself")
    return tool_of(got.name, got.description, got.parameters, strict=got.strict)


def _status(reply: Reply) -> str:
    return "completed" if reply.finish in ("stop", "tool_calls") else "incomplete"


def _items(answer: ChatAnswer) -> list[dict[str, Any]]:
    """Write an answer's items, whole. Only the last item of a cut answer is incomplete."""
    reply, status = answer.replies[0], _status(answer.replies[0])
    message, items = reply.message, []
    has_text = bool(message.content or not (message.calls or message.reasoning))
    if message.reasoning:
        is_last = not (has_text or message.calls)
        items.append(_said_item("reasoning", f"rs_{answer.id}", message.reasoning, status=status if is_last else "completed"))
    if has_text:
        logprobs = [told_logprob(token) for token in reply.logprobs]
        items.append(_said_item("content", f"msg_{answer.id}", message.content, status=status, logprobs=logprobs))
    for at, call in enumerate(message.calls):
        items.append(_call_item(f"fc_{answer.id}_{at}", call, status="completed"))
    return items


def _said_item(kind: SaidKind, item_id: str, text: str, *, status: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    if kind == "reasoning":
        part = {"type": "reasoning_text", "text": text}
        return {"type": "reasoning", "id": item_id, "summary": [], "status": status, "content": [part]}
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": [part]}


def _call_item(item_id: str, call: ToolCall, *, status: str) -> dict[str, Any]:
    return {"type": "function_call", "id": item_id, "call_id": call.id, "name": call.name, "arguments": call.arguments, "status": status}


def _response(request: ChatRequest, answer: ChatAnswer, items: list[dict[str, Any]], status: str) -> dict[str, Any]:
    prompt, generated = answer.num_prompt_tokens, sum(reply.num_tokens for reply in answer.replies)
    usage = {
        "input_tokens": prompt, "input_tokens_details": {"cached_tokens": answer.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": generated, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + generated}
    reason = "max_output_tokens" if any(reply.finish == "length" for reply in answer.replies) else "aborted"
    return {
        "id": f"resp_{answer.id}", "object": "response", "created_at": answer.created, "status": status, "model": answer.model,
        "output": items, "usage": None if status == "in_progress" else usage,
        "error": None, "incomplete_details": {"reason": reason} if status == "incomplete" else None,
        "instructions": None, "metadata": {}, "previous_response_id": None, "store": False, "truncation": "disabled",
        "max_output_tokens": request.max_new_tokens, "top_logprobs": request.top_logprobs,
        "temperature": request.temperature, "top_p": request.top_p,
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": None},
        "parallel_tool_calls": request.parallel_calls,
        "tool_choice": {"type": "function", "name": request.tool_name} if request.tool_name else request.tool_choice,
        "tools": [
            {"type": "function", "name": tool.name, "description": tool.description, "parameters": dict(tool.parameters), "strict": False}
            for tool in request.tools],
    }


def _error(message: str, status: int) -> dict[str, Any]:
    # The API's own event has no `error`, which is where OpenAI's client looks before it raises.
    told = openai_error(message, status=status)
    return {"type": "error", **told, "message": message, "code": told["error"]["code"], "param": None}


class _ResponsesStream:
    """Writes an answer in items, each of which ends before the next begins. Text behind a call is an item of its own.

    The log-probabilities of tokens come with the text that follows them, and with the item's end.
    """

    def __init__(self, request: ChatRequest, begun: ChatAnswer) -> None:
        self._request, self._answer = request, begun
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open: SaidKind | None = None
        self._item_id = ""
        self._texts: list[str] = []
        self._logprobs: list[Any] = []  # of the open item
        self._waiting: list[Any] = []

    def begin(self) -> bytes:
        begun = _response(self._request, self._answer, [], "in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def pieces(self, index: int, pieces: Sequence[Piece], logprobs: Sequence[TokenLogprob] = ()) -> bytes:  # noqa: ARG002
        self._waiting += map(told_logprob, logprobs)
        return b"".join(self._said(piece) if isinstance(piece, Said) else self._write_call(piece) for piece in pieces)

    def close(self, index: int, reply: Reply) -> bytes:  # noqa: ARG002
        begun = b"" if self._items or self._open else self._begin_item("content")
        return begun + self._end_item(_status(reply))

    def end(self, answer: ChatAnswer) -> bytes:
        status = _status(answer.replies[0])
        return self._event(f"response.{status}", response=_response(self._request, answer, self._items, status))

    def error(self, message: str, *, status: int) -> bytes:
        return event({**_error(message, status), "sequence_number": self._number})

    def _said(self, piece: Said) -> bytes:
        begun = b"" if self._open == piece.kind else self._begin_item(piece.kind)
        self._texts.append(piece.text)
        return begun + self._part_event("delta", delta=piece.text, **self._taken())

    def _write_call(self, call: ToolCall) -> bytes:
        ended = self._end_item("completed")
        item_id = f"fc_{self._answer.id}_{sum(item['type'] == 'function_call' for item in self._items)}"
        item, place = _call_item(item_id, call, status="completed"), {"item_id": item_id, "output_index": len(self._items)}
        told = [
            self._event("response.output_item.added", output_index=len(self._items), item={
                **item, "arguments": "", "status": "in_progress"}),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=len(self._items), item=item)]
        self._items.append(item)
        return ended + b"".join(told)

    def _begin_item(self, kind: SaidKind) -> bytes:
        ended = self._end_item("completed")
        name, others = ("rs", "reasoning") if kind == "reasoning" else ("msg", "message")
        before = sum(item["type"] == others for item in self._items)
        self._open, self._item_id = kind, f"{name}_{self._answer.id}" + (f"_{before}" if before else "")
        self._texts, self._logprobs = [], []
        item = _said_item(kind, self._item_id, "", status="in_progress")
        (part,) = item["content"]
        return ended + self._event(
            "response.output_item.added", output_index=len(self._items), item={**item, "content": []},
        ) + self._event("response.content_part.added", **self._place(), part=part)

    def _end_item(self, status: str) -> bytes:
        if self._open is None:
            return b""
        text = "".join(self._texts)
        self._taken()
        item = _said_item(self._open, self._item_id, text, status=status, logprobs=self._logprobs)
        (part,) = item["content"]
        told = [
            self._part_event("done", text=text, **({"logprobs": self._logprobs} if self._open == "content" else {})),
            self._event("response.content_part.done", **self._place(), part=part),
            self._event("response.output_item.done", output_index=len(self._items), item=item)]
        self._items.append(item)
        self._open = None
        return b"".join(told)

    def _taken(self) -> dict[str, Any]:
        """Return the log-probabilities that wait, as a field of an event of text; reasoning has none."""
        if self._open != "content":
            return {}
        taken, self._waiting = self._waiting, []
        self._logprobs += taken
        return {"logprobs": taken}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": len(self._items), "content_index": 0}

    def _part_event(self, what: str, **fields: Any) -> bytes:
        kind = "output_text" if self._open == "content" else "reasoning_text"
        return self._event(f"response.{kind}.{what}", **self._place(), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        told = event({"type": kind, **fields, "sequence_number": self._number})
        self._number += 1
        return told
