"""Messages of a chat in a record, as data sets have them, made into one form. Used by `row` and `pairs`.

Read are `role` and `content`; content in parts, as long as all are text; tool calls and their results; `reasoning_content`; and the older
`from` and `value`. Keys that hold nothing are left out, because tables give every row the keys of all rows.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.errors import DataError

Message = dict[str, Any]
"""`role` and `content`, both text, and where a chat has them `tool_calls`, `tool_call_id`, `name` (of a tool) and `reasoning_content`."""

Tool = dict[str, Any]
"""A function that the assistant may call, described as chat templates take it."""

_OLD_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "function": "tool", "observation": "tool"}


def parse_messages(value: Any, name: str, where: str) -> tuple[Message, ...]:
    """Return a chat from the field `name` of a record; raises DataError, which names the record `where`, if it is none."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: field {name!r} must be a list of messages, got {kind_of(value)}")
    return tuple(_message(message, name, where) for message in value)


def parse_tools(value: Any, name: str, where: str) -> tuple[Tool, ...]:
    """Return the tools from the field `name` of a record: a list of objects, or one as JSON text; raises DataError if it is neither."""
    if value is None:
        return ()
    given = value
    if isinstance(value, str):
        try:
            given = json.loads(value) if value.strip() else []
        except ValueError:
            given = None
    if not isinstance(given, list) or not all(isinstance(tool, Mapping) for tool in given):
        raise DataError(f"{where}: field {name!r} must be a list of tools, each an object that describes a function, got {kind_of(value)}")
    return tuple(_without_nothing(tool) for tool in given)


def text_of(message: Mapping[str, Any]) -> str:
    """Return what a message says: its text, or its tool calls as JSON if it has no text."""
    return message["content"] or (json.dumps(message["tool_calls"], ensure_ascii=False) if message.get("tool_calls") else "")


def with_system(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """Return a chat with a system message before it, unless it has one of its own or there is no text for one."""
    if not text or any(message["role"] == "system" for message in messages):
        return tuple(messages)
    return ({"role": "system", "content": text}, *messages)


def kind_of(value: Any) -> str:
    """Return what a value of the wrong kind is called in messages."""
    return "null" if value is None else "an empty list" if value == [] else type(value).__name__


def _message(message: Any, name: str, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where}: each message in {name!r} must be an object with 'role' and 'content', got {kind_of(message)}")
    if "role" not in message and isinstance(message.get("from"), str):
        role, content = _OLD_ROLES.get(message["from"], message["from"]), message.get("value")
    else:
        role, content = message.get("role"), message.get("content")
    calls = message.get("tool_calls")
    content = _text(content, has_calls=bool(calls))
    if not isinstance(role, str) or content is None:
        raise DataError(
            f"{where}: each message in {name!r} must have text in 'role' and 'content', got {json.dumps(message, default=str)[:80]}")
    found: Message = {"role": role, "content": content}
    if calls:
        found["tool_calls"] = _calls(calls, name, where)
    for key in ("reasoning_content", "tool_call_id", *(("name",) if role == "tool" else ())):
        if isinstance(value := message.get(key), str) and value:
            found[key] = value
    return found


def _text(content: Any, *, has_calls: bool) -> str | None:
    """Return content as text; None if it is something else."""
    if content is None and has_calls:
        return ""
    if isinstance(content, list) and content:
        parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
        return "".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]
    return content if isinstance(content, str) else None


def _calls(calls: Any, name: str, where: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects, which is how chat templates write them."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f"{where}: tool_calls of a message in {name!r} must be a list of objects, got {kind_of(calls)}")
    found = []
    for call in map(_without_nothing, calls):
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{where}: each of tool_calls in {name!r} must have a function with a 'name', got {json.dumps(call, default=str)[:80]}")
        if isinstance(arguments := function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(arguments)
            except ValueError as exc:
                raise DataError(f"{where}: the arguments of a tool call in {name!r} are not JSON: {arguments[:60]!r}") from exc
        found.append(call)
    return found


def _without_nothing(value: Any) -> Any:
    """Return an object without the keys that hold null, at any depth."""
    if isinstance(value, Mapping):
        return {key: _without_nothing(each) for key, each in value.items() if each is not None}
    return [_without_nothing(each) for each in value] if isinstance(value, list) else value
