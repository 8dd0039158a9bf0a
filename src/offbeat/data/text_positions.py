"""Positions of the messages' texts in a rendered chat, found by rendering it once more with marks in its texts. Called by `data.chat`.

A mark is a character that the chat does not have, placed at the ends of a text. Without its marks, the rendering has to be the same as
before, so a mark's position is its text's. Text is never searched for, so an answer is not taken for equal words elsewhere.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from offbeat.data.forms import REASONING, Messages, Render, Tools
from offbeat.errors import DataError

_MARKS = (0x20000, 0x2A6D0)
"""Ideographs of Extension B: they have no case and no other forms, JSON and Python's quotes leave them as they are."""

_MOST_ALONE = 64
"""Texts that are marked one by one, where a template writes something else once all of them are marked."""

_TOOL = -1


@dataclass(frozen=True)
class Place:
    """One text of a chat, and where it is in the rendering.

    Attributes:
        message: index of its message; -1 for a tool's.
        kind: "content", "reasoning", "call" or "tool".
        said: the text.
        start: where it begins; None if its first characters are not written.
        end: where it ends; None if its last characters are not written.
        shows: whether all of it is written, white space and the case of letters apart.
    """

    message: int
    kind: str
    said: str
    start: int | None
    end: int | None
    shows: bool


def find_places(
    text: str, render: Render, messages: Messages, tools: Tools, *, of: Callable[[int, str], bool],
) -> list[Place]:
    """Find the texts of a chat in its rendering, in the order of the chat.

    Args:
        text: the rendering of messages and tools by `render`.
        of: whether texts of a message and kind, such as "reasoning", are looked for.
    """
    texts = [(message, kind, said) for message, kind, said in _texts(messages, tools) if of(message, kind)]
    used = set(text)
    # Only as many as there are texts: going through all of them takes longer than rendering.
    marks = list(islice((sign for sign in map(chr, range(*_MARKS)) if sign not in used), 2 * len(texts)))
    if 2 * len(texts) > len(marks):
        raise DataError(f"the chat has {len(texts)} texts, allowed are {len(marks) // 2}; shorten it")

    def attempt(chosen: Sequence[int], *, both: bool) -> dict[str, list[int]] | None:
        counter = iter(range(len(texts)))
        wanted = set(chosen)

        def mark(message: int, kind: str, said: str) -> str:
            if not said.strip() or not of(message, kind):
                return said
            number = next(counter)
            if number not in wanted:
                return said
            core = said.strip()
            at = said.index(core)
            return f"{said[:at]}{marks[2 * number] if both else ''}{core}{marks[2 * number + 1]}{said[at + len(core):]}"

        marked = render(*_mapped(messages, tools, mark))
        return None if marked is None else _positions(marked, text, set(marks[: 2 * len(texts)]))

    if (found := attempt(range(len(texts)), both=True)) is None:
        found = {}
        for number in range(min(len(texts), _MOST_ALONE)):
            found |= attempt([number], both=True) or attempt([number], both=False) or {}
    return [_place(text, *each, found.get(marks[2 * n], []), found.get(marks[2 * n + 1], [])) for n, each in enumerate(texts)]


def _positions(marked: str, text: str, marks: set[str]) -> dict[str, list[int]] | None:
    """Return where marks are in the text without them; None if that is another text."""
    found: dict[str, list[int]] = {}
    plain: list[str] = []
    for sign in marked:
        if sign in marks:
            found.setdefault(sign, []).append(len(plain))
        else:
            plain.append(sign)
    return found if "".join(plain) == text else None


def _place(text: str, message: int, kind: str, said: str, starts: list[int], ends: list[int]) -> Place:
    # A template may write a text more than once: its last copy is the one that an end of the turn follows.
    end = ends[-1] if ends else None
    start = max((at for at in starts if end is None or at <= end), default=None)
    core = _squeezed(said)
    if end is None or start is None:
        shown = "" if end is None else _squeezed(text[:end])
        shows = bool(shown) and shown.endswith(core) and start is None and not starts
        return Place(message, kind, said, end - len(said.strip()) if shows and end is not None else start, end, shows)
    escaped = (_squeezed(json.dumps(said, ensure_ascii=ascii)[1:-1]) for ascii in (False, True))
    return Place(message, kind, said, start, end, _squeezed(text[start:end]) in (core, *escaped))


def _squeezed(text: str) -> str:
    return "".join(text.split()).casefold()


def _texts(messages: Messages, tools: Tools) -> Iterator[tuple[int, str, str]]:
    found: list[tuple[int, str, str]] = []

    def collect(message: int, kind: str, said: str) -> str:
        if said.strip():
            found.append((message, kind, said))
        return said

    _mapped(messages, tools, collect)
    return iter(found)


Change = Callable[[int, str, str], str]


def _mapped(messages: Messages, tools: Tools, change: Change) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a chat and its tools with `change` applied to every text."""
    return (
        [_message(message, lambda kind, said, i=index: change(i, kind, said)) for index, message in enumerate(messages)],
        [_tool(tool, change) for tool in tools])


def _message(message: Mapping[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    found = dict(message)
    for key in REASONING:
        if isinstance(message.get(key), str):
            found[key] = change("reasoning", message[key])
    content = message.get("content")
    if isinstance(content, str):
        found["content"] = change("content", content)
    elif isinstance(content, Sequence):
        found["content"] = [
            {**part, "text": change("content", part["text"])} if isinstance(part, Mapping) and isinstance(part.get("text"), str) else part
            for part in content]
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call, change) for call in calls]
    return found


def _call(call: Mapping[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    nested = isinstance(call.get("function"), Mapping)
    function = dict(call["function"] if nested else call)
    function["name"] = change("call", function["name"])
    if "arguments" in function:
        function["arguments"] = _value(function["arguments"], change)
    return {**call, "function": function} if nested else function


def _value(value: Any, change: Callable[[str, str], str]) -> Any:
    if isinstance(value, Mapping):
        return {change("call", key): _value(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_value(each, change) for each in value]
    return change("call", value) if isinstance(value, str) else value


def _tool(tool: Mapping[str, Any], change: Change) -> dict[str, Any]:
    nested = isinstance(tool.get("function"), Mapping)
    function = dict(tool["function"] if nested else tool)
    for key in ("name", "description"):
        if isinstance(function.get(key), str):
            function[key] = change(_TOOL, "tool", function[key])
    return {**tool, "function": function} if nested else function
