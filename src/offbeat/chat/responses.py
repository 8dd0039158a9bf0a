"""Responses, OpenAI's later API: POST /v1/responses. Nothing is stored, so a request holds all items of its conversation.

An answer's reasoning, text and calls are items of their own, and come back as items; `read` joins them to one message of the assistant.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from offbeat.chat.completions import told_logprob
from offbeat.chat.dialects import (
    COMMENT,
    Part,
    Wishes,
    call_of,
    check_choice,
    check_tools,
    event,
    named,
    openai_error,
    read_fields,
    text_of,
    tool_of,
)
from offbeat.chat.fields import Surface
from offbeat.chat.messages import ChatAnswer, ChatRequest, Message, Role, Tool, ToolCall
from offbeat.chat.shaping import structure_of
from offbeat.errors import RefusedError

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class _Item(msgspec.Struct):
    type: str = "message"
    role: str = ""
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str | dict[str, Any] | None = None
    output: str | list[Part] | None = None


class _Tool(msgspec.Struct):
    type: str = "function"
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Text(msgspec.Struct):
    format: dict[str, Any] | None = None


class _Reasoning(msgspec.Struct):
    effort: str | None = None


class _Body(Wishes, kw_only=True):
    input: str | list[_Item]
    instructions: str | None = None
    tools: list[_Tool] | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None


class Responses:
    """The dialect of /v1/responses."""

    keep_alive = COMMENT
    always_parsed = True

    def __init__(self, surface: Surface = "engine") -> None:
        """`surface` says whose column of the table of fields counts."""
        self._surface: Surface = surface

    def read(self, body: bytes) -> ChatRequest:
        got = read_fields(_Body, body, api="Responses", surface=self._surface)
        tools = check_tools([_tool(tool) for tool in got.tools or ()])
        choice, name = _choice(got.tool_choice)
        check_choice(choice, name, tools)
        return ChatRequest(
            messages=_messages(got.input, got.instructions),
            tools=tools,
            tool_choice=choice,  # type: ignore[reportArgumentType]
            tool_name=name,
            max_new_tokens=got.max_output_tokens,
            effort=(got.reasoning.effort if got.reasoning is not None else None) or "",
            logprobs="message.output_text.logprobs" in (got.include or ()) or bool(got.top_logprobs),
            **got.wanted(structure=structure_of(got.text.format if got.text is not None else None, "text.format")),
        )

    def whole(self, request: ChatRequest, answer: ChatAnswer) -> bytes:
        return msgspec.json.encode(_response(request, answer, _items(answer), _status(answer)))

    def events(self, request: ChatRequest, answer: ChatAnswer) -> Iterator[bytes]:
        for number, told in enumerate(_events(request, answer)):
            yield event({**told, "sequence_number": number})

    def error(self, message: str, *, status: int, param: str = "") -> bytes:
        return msgspec.json.encode(openai_error(message, status=status, param=param))

    def stream_error(self, message: str, *, status: int) -> bytes:
        # The API's own event has no `error`, which is where OpenAI's client looks before it raises.
        told = openai_error(message, status=status)
        return event({"type": "error", **told, "message": message, "code": told["error"]["code"], "param": None, "sequence_number": 0})


# -- reading -------------------------------------------------------------------------------------------------------------------------------


def _messages(got: str | Sequence[_Item], instructions: str | None) -> tuple[Message, ...]:
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
            messages.append(Message(_ROLES[item.role], text_of(item.content, f"{where}.content")))
        elif item.type == "function_call_output":
            messages.append(Message("tool", text_of(item.output, f"{where}.output"), call_id=item.call_id))
        else:
            _add_own(messages, item, where)
    return named(messages)


def _add_own(messages: list[Message], item: _Item, where: str) -> None:
    """Add an item of the assistant's to its last message, if it can be of the same answer: reasoning comes first, then text, then calls."""
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if item.type == "reasoning":
        content = item.content if item.content else item.summary
        messages.append(Message("assistant", reasoning=text_of(content, f"{where}.content")))
    elif item.type == "message":
        text = text_of(item.content, f"{where}.content")
        if last is not None and not last.content and not last.calls:
            messages[-1] = Message("assistant", text, reasoning=last.reasoning)
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


def _tool(got: _Tool) -> Tool:
    if got.type != "function":
        raise RefusedError(f"tools has one of type {got.type!r}, and none is built in here; only functions, which the client runs itself")
    return tool_of(got.name, got.description, got.parameters)


def _choice(got: str | dict[str, Any] | None) -> tuple[str, str]:
    if got is None or isinstance(got, str):
        return got or "auto", ""
    if got.get("type") == "function" and isinstance(got.get("name"), str):
        return "required", got["name"]
    raise RefusedError(f"tool_choice must be 'auto', 'none', 'required' or name one function, got type {got.get('type')!r}")


# -- writing -------------------------------------------------------------------------------------------------------------------------------


def _status(answer: ChatAnswer) -> str:
    return "completed" if answer.replies[0].finish in ("stop", "tool_calls") else "incomplete"


def _items(answer: ChatAnswer) -> list[dict[str, Any]]:
    """Write an answer's items, whole."""
    reply, status = answer.replies[0], _status(answer)
    message, items = reply.message, []
    if message.reasoning:
        items.append({
            "type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "status": status,
            "content": [{"type": "reasoning_text", "text": message.reasoning}]})
    if message.content or not (message.calls or message.reasoning):
        logprobs = [told_logprob(token) for token in reply.logprobs]
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": logprobs}
        items.append({"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": status, "content": [part]})
    for at, call in enumerate(message.calls):
        items.append(_call_item(f"fc_{answer.id}_{at}", call, status="completed"))
    return items


def _call_item(item_id: str, call: ToolCall, *, status: str) -> dict[str, Any]:
    return {
        "type": "function_call", "id": item_id, "call_id": call.id, "name": call.name, "arguments": call.arguments, "status": status}


def _response(request: ChatRequest, answer: ChatAnswer, items: list[dict[str, Any]], status: str) -> dict[str, Any]:
    prompt, generated = answer.num_prompt_tokens, answer.replies[0].num_tokens
    usage = {
        "input_tokens": prompt, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + generated}
    reason = "max_output_tokens" if answer.replies[0].finish == "length" else "aborted"
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


def _events(request: ChatRequest, answer: ChatAnswer) -> Iterator[dict[str, Any]]:
    items, status = _items(answer), _status(answer)
    begun = _response(request, answer, [], "in_progress")
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for at, item in enumerate(items):
        place = {"item_id": item["id"], "output_index": at}
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield {"type": "response.output_item.added", "output_index": at, "item": {**item, **empty, "status": "in_progress"}}
        if item["type"] == "function_call":
            yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": item["arguments"]}
        else:
            yield from _part_events(item["content"][0], {**place, "content_index": 0})
        yield {"type": "response.output_item.done", "output_index": at, "item": item}
    yield {"type": f"response.{status}", "response": _response(request, answer, items, status)}


def _part_events(part: dict[str, Any], place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    kind = "response." + part["type"]  # output_text or reasoning_text
    extra = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": "", **({"logprobs": []} if extra else {})}}
    if part["text"]:
        yield {"type": f"{kind}.delta", **place, "delta": part["text"], **extra}
    yield {"type": f"{kind}.done", **place, "text": part["text"], **extra}
    yield {"type": "response.content_part.done", **place, "part": part}
