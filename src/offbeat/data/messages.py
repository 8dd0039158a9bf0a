"""Converts the messages of a chat in a record to one form. Used by `row` and `pairs`.

A chat is a list of messages, such as [{"from": "human", "value": "2+2="}], or such a list as JSON text. `data.chat_keys` lists the meanings
of roles and keys; nothing is left out in silence. The form of a call's arguments stays as the record has it: `Tokenizer.chat_text` converts
it for templates.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.data.chat_keys import CALL, CONTENT_KEYS, MARKS, READ_AS, REFUSED, ROLE_KEYS, THOUGHTS, holds_message, read_role
from offbeat.data.image_sources import MARK, PART_KINDS, ImageSource, image_of_part
from offbeat.errors import DataError

Message = dict[str, Any]
"""`role` and `content`, both text, and where a chat has them `tool_calls`, `tool_call_id`, `name`, `reasoning_content`, `weight` (0 where
an assistant's message is not trained on), and keys that only the chat template may know."""

Tool = dict[str, Any]
"""A function that the assistant may call, described as chat templates take it."""

_CHAT = re.compile(r"\s*\[\s*\{\s*\"")
_PYTHON = re.compile(r"\s*\[\s*\{\s*'(?:role|from|content|value)'\s*:")
_NULL_VALUES = ("default", "const", "example", "examples", "enum")
"""Keywords of a JSON schema whose value may be null, or hold null; below any other, null is a missing key."""
_SAME = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


def parse_messages(value: Any, name: str, where: str, *, images: list[ImageSource | None] | None = None) -> tuple[Message, ...]:
    """Return a chat from the field `name` of a record; raises DataError, which names the record `where`, if it is none.

    The images in the messages are appended to `images`, None for one of the row's column, and `MARK` stands in their places; without
    `images` they are refused.
    """
    given = chat_in(value, name, where) if isinstance(value, str) else value
    if not isinstance(given, list) or not given:
        as_text = ", or one as JSON text" if isinstance(value, str) else ""
        raise DataError(f"{where}: field {name!r} must be a list of messages{as_text}, got {kind_of(value)}")
    found: list[Message] = []
    for message in (_message(each, name, where, images) for each in given):
        if message.pop(CALL, False) and found and found[-1]["role"] == "assistant":  # calls of one turn, written as several messages
            found[-1] = {**found[-1], "tool_calls": [*found[-1].get("tool_calls", ()), *message["tool_calls"]]}
        else:
            found.append(message)
    return tuple(found)


def chat_in(text: str, name: str, where: str) -> list[Any] | None:
    """Return the chat of a JSON text, None for other text; raises DataError for a chat as Python prints it, such as "[{'role': ..."."""
    if _PYTHON.match(text):
        raise DataError(
            f"{where}: field {name!r} holds a chat as Python prints it, which is not JSON: {text[:60]!r}; write it with json.dumps, or the"
            " rows as JSON lines")
    if not _CHAT.match(text):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if all(map(holds_message, found)) else None


def parse_tools(value: Any, name: str, where: str) -> tuple[Tool, ...]:
    """Return the tools from the field `name` of a record: a list of objects, or one as JSON text; raises DataError if it is neither.

    Each may be JSON text, too. Null stays where a JSON schema allows it, as the default of a parameter; elsewhere it is a key left out.
    """
    if value is None:
        return ()
    given = _json(value) if isinstance(value, str) and value.strip() else value or []
    given = [_json(tool) if isinstance(tool, str) else tool for tool in given] if isinstance(given, list) else given
    if not isinstance(given, list) or not all(isinstance(tool, Mapping) for tool in given):
        raise DataError(f"{where}: field {name!r} must be a list of tools, each an object that describes a function, got {kind_of(value)}")
    return tuple(_schema(tool) for tool in given)


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message's text, or its tool calls as JSON, with arguments as objects, if it has no text."""
    calls = message.get("tool_calls")
    return message["content"] or (json.dumps([with_arguments(call, as_text=False) for call in calls], ensure_ascii=False) if calls else "")


def with_arguments(call: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """Return a call with its arguments as JSON text, such as '{"a": 1}', or as the object."""
    if isinstance(inner := call.get("function"), Mapping):
        return {**call, "function": with_arguments(inner, as_text=as_text)}
    arguments = call.get("arguments")
    if arguments is None or isinstance(arguments, str) is as_text:
        return dict(call)
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else json.loads(arguments or "{}")}


def is_learnt(message: Mapping[str, Any]) -> bool:
    """Whether supervised fine-tuning trains on a message: the assistant's, and not marked as context."""
    return message["role"] == "assistant" and message.get("weight") != 0


def as_context(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages, marked so that none is trained on."""
    return tuple({**message, "weight": 0} if message["role"] == "assistant" else message for message in messages)


def for_template(message: Mapping[str, Any], *, arguments_as_text: bool) -> dict[str, Any]:
    """Return a message for a chat template: with thoughts under each of their names, and arguments of calls in its form."""
    written = {key: value for key, value in message.items() if key not in (*THOUGHTS, "weight")}
    if thoughts := next((message[key] for key in THOUGHTS if message.get(key)), None):
        written |= dict.fromkeys(THOUGHTS, thoughts)
    if calls := message.get("tool_calls"):
        written["tool_calls"] = [with_arguments(call, as_text=arguments_as_text) for call in calls]
    return written


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two messages agree in the keys of `_SAME`."""
    return all(one.get(key) == other.get(key) for key in _SAME)


def with_system(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """Return a chat with a system message before it, unless it has one of its own or there is no text for one."""
    if not text or any(message["role"] == "system" for message in messages):
        return tuple(messages)
    return ({"role": "system", "content": text}, *messages)


def kind_of(value: Any) -> str:
    """Return the name of a value's kind for messages, such as "null", "an empty list" or "int"."""
    return "null" if value is None else "an empty list" if value == [] else type(value).__name__


def without_filled_nulls(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of a table without the nulls in its chats and tools that stand for keys of other rows."""
    return {
        name: _without_nulls(value) if isinstance(value, list) and value and all(map(_is_of_chat, value)) else value
        for name, value in record.items()}


def _is_of_chat(value: Any) -> bool:
    """Whether an object in a table is a message or a tool, by its keys."""
    return isinstance(value, Mapping) and (holds_message(value) or "function" in value or {"name", "parameters"} <= value.keys())


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _schema(value: Any) -> Any:
    """Return a JSON schema without keys that hold null where it allows none."""
    if isinstance(value, Mapping):
        return {
            key: each if key in _NULL_VALUES else _schema(each) for key, each in value.items() if each is not None or key in _NULL_VALUES}
    return [_schema(each) for each in value] if isinstance(value, list) else value


def _message(message: Any, name: str, where: str, images: list[ImageSource | None] | None) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where}: each message in {name!r} must be an object with 'role' and 'content', got {kind_of(message)}")
    given = {key: value for key, value in message.items() if value is not None}
    role, content = _one_of(ROLE_KEYS, given, name, where), _one_of(CONTENT_KEYS, given, name, where)
    found_role = _role(role, name, where, named_by="role" if "role" in given else "from")
    calls = _all_calls(given, name, where)
    if found_role == CALL:
        calls, content = [*calls, *_calls_in(content, name, where)], ""
    text, thoughts = _texts(_marked(content, role, name, where, images))
    thoughts = _thoughts(given, thoughts, name, where)
    if found_role in ("assistant", None) and content is None and (calls or thoughts):
        text = ""
    if found_role is None or text is None:
        raise DataError(
            f"{where}: each message in {name!r} must have text in 'role' and 'content', got {json.dumps(message, default=str)[:80]}")
    is_call = found_role == CALL
    found: Message = {"role": "assistant" if is_call else found_role, "content": text}
    if found["role"] != "assistant" and (calls or thoughts):
        raise DataError(f"{where}: a message of {role!r} in {name!r} has {'calls' if calls else 'thoughts'}, which only the assistant has")
    _refuse_unread(given, thoughts, name, where)
    known = {*ROLE_KEYS, *CONTENT_KEYS, *THOUGHTS, *MARKS, *REFUSED, "tool_calls", "function_call"}
    found |= {key: _plain(value) for key, value in given.items() if key not in known and value != "" and value != []}
    found |= {"tool_calls": calls} if calls else {}
    found |= {"reasoning_content": thoughts} if thoughts else {}
    found |= {"weight": 0} if _is_context(given, found["role"], name, where) else {}
    return found | ({CALL: True} if is_call else {})


def _one_of(keys: tuple[str, str], given: Mapping[str, Any], name: str, where: str) -> Any:
    """Return the value that one of two keys has, or that both have alike."""
    values = [given[key] for key in keys if key in given]
    if len(values) > 1 and values[0] != values[1]:
        raise DataError(f"{where}: a message in {name!r} has both {keys[0]!r} and {keys[1]!r}, and they differ; leave one of them out")
    return values[0] if values else None


def _role(role: Any, name: str, where: str, *, named_by: str) -> str | None:
    """Return our role for one in a record, such as "user" for "human"; a role that is not in `ROLES` stays, for the template."""
    if not isinstance(role, str) or not role.strip():
        return None
    if (found := read_role(role)) is not None:
        return found
    if named_by == "from":
        raise DataError(
            f"{where}: a message in {name!r} is from {role!r}, which is none of the known roles {', '.join(READ_AS)}; write one of these")
    return role


def _marked(content: Any, role: Any, name: str, where: str, images: list[ImageSource | None] | None) -> Any:
    """Return a message's content with text in the place of its images, which are appended to `images`."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in PART_KINDS:
            if images is None or read_role(str(role)) == "assistant":
                what = "the assistant's message" if images is not None else "a message"
                raise DataError(f"{where}: {what} in {name!r} has an image, which is not read there; leave it out")
            images.append(image_of_part(part, f"{where}: image {len(images) + 1}"))
            part = {"type": "text", "text": MARK}
        parts.append(part)
    return parts


def _texts(content: Any) -> tuple[str | None, str]:
    """Return content as text, None if it is something else, and the thoughts that stand among its parts."""
    if not isinstance(content, list) or not content:
        return (content if isinstance(content, str) else None), ""
    texts: list[str] = []
    thoughts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("thinking", "reasoning"):
            inner, _ = _texts(part.get("thinking") or part.get("text") or part.get("reasoning"))
            into = thoughts
        else:
            inner = part if isinstance(part, str) else part.get("text") if kind in ("text", "input_text", "output_text") else None
            into = texts
        if not isinstance(inner, str):
            return None, ""
        into.append(inner)
    return "".join(texts), "".join(thoughts)


def _thoughts(given: Mapping[str, Any], in_parts: str, name: str, where: str) -> str:
    """Return the thoughts of a message, which stand in one of several keys or among the parts of its content."""
    texts = {key: _texts(given[key])[0] for key in THOUGHTS if given.get(key)} | ({"content": in_parts} if in_parts else {})
    for key, text in texts.items():
        if text is None:
            raise DataError(f"{where}: {key!r} of a message in {name!r} must be text, got {kind_of(given[key])}")
    if len(set(texts.values())) > 1:
        raise DataError(f"{where}: a message in {name!r} has different thoughts in {' and '.join(map(repr, texts))}; leave one of them out")
    return next((text for text in texts.values() if text), "")


def _all_calls(given: Mapping[str, Any], name: str, where: str) -> list[dict[str, Any]]:
    """Return the calls of a message, in their form of today or the older one."""
    calls, call = given.get("tool_calls"), given.get("function_call")
    calls = _json(calls) if isinstance(calls, str) and calls.strip() else calls
    if not call:
        return _calls(calls, name, where) if calls else []
    if calls:
        raise DataError(f"{where}: a message in {name!r} has both 'tool_calls' and 'function_call'; leave one of them out")
    if not isinstance(call, Mapping):
        raise DataError(f"{where}: function_call of a message in {name!r} must be an object, got {kind_of(call)}")
    return _calls([{"type": "function", "function": call}], name, where)


def _calls_in(content: Any, name: str, where: str) -> list[dict[str, Any]]:
    """Return the calls that the content of a message is: one or a list, as JSON, each with a name and arguments."""
    found = _json(content) if isinstance(content, str) else content
    found = [found] if isinstance(found, Mapping) else found
    if not isinstance(found, list) or not found or not all(isinstance(call, Mapping) for call in found):
        raise DataError(
            f"{where}: a message of calls in {name!r} must hold JSON with a 'name' and 'arguments', or a list of such, got"
            f" {str(content)[:60]!r}")
    return _calls([call if "function" in call else {"type": "function", "function": call} for call in found], name, where)


def _calls(calls: Any, name: str, where: str) -> list[dict[str, Any]]:
    """Return tool calls, with their arguments in the form that they have: an object, or its JSON text."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f"{where}: tool_calls of a message in {name!r} must be a list of objects, got {kind_of(calls)}")
    found = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{where}: each of tool_calls in {name!r} must have a function with a 'name', got {json.dumps(call, default=str)[:80]}")
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments.strip() and _json(arguments) is None:
            raise DataError(f"{where}: the arguments of a tool call in {name!r} are not JSON: {arguments[:60]!r}")
        function = {key: value for key, value in function.items() if value is not None}
        if isinstance(arguments, str) and not arguments.strip():
            function["arguments"] = "{}"
        rest = {key: value for key, value in call.items() if value is not None}
        found.append({**rest, "function": function} if "function" in call else function)
    return found


def _is_context(given: Mapping[str, Any], role: str, name: str, where: str) -> bool:
    """Whether a message of the assistant is marked as not to be trained on."""
    marks = {key: given[key] for key in MARKS if key in given}
    for key, value in marks.items():
        if value not in (0, 1) or not isinstance(value, bool | int | float):
            raise DataError(
                f"{where}: {key!r} of a message in {name!r} must be 0, 1, false or true, got {str(value)[:40]!r}; a message is trained on"
                " or it is not")
        if value and role != "assistant":
            raise DataError(
                f"{where}: {key!r} of a message of {role!r} in {name!r} is {str(value).lower()}, but only the assistant's are trained on;"
                " leave it out")
    if len({bool(value) for value in marks.values()}) > 1:
        raise DataError(f"{where}: {' and '.join(map(repr, marks))} of a message in {name!r} contradict each other; leave one of them out")
    return role == "assistant" and any(not value for value in marks.values())


def _refuse_unread(given: Mapping[str, Any], thoughts: str, name: str, where: str) -> None:
    for key, remedy in REFUSED.items():
        if given.get(key) and not (thoughts and key in ("reasoning_details", "thinking_blocks")):  # with the same text in parts
            raise DataError(f"{where}: a message in {name!r} has {key!r}, which is not read; {remedy}")


def _json(text: str) -> Any:
    """Return the value of a JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, so that it can cross to other processes."""
    return value if isinstance(value, str | int | float) else json.loads(json.dumps(value, default=str))
