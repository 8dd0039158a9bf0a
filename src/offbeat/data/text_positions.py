"""Positions of the messages' texts in a rendered chat, found by rendering it once more with marks in its texts. Called by `data.chat`.

A mark is a character that the chat does not have, placed at the ends of a text. Without its marks, the rendering has to be the same as
before, so a mark's position is its text's. Text is never searched for, so an answer is not taken for equal words elsewhere.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
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


@dataclass(frozen=True)
class SoughtTexts:
    """Texts of a chat that are looked for: of one message, or with None of all messages and tools; with or without reasoning."""

    message: int | None = None
    reasoning: bool = True

    def includes(self, message: int, kind: str) -> bool:
        """Whether texts of a message and kind are looked for; see `Place`."""
        return self.message in (None, message) and (self.reasoning or kind != "reasoning")


def find_places(text: str, render: Render, messages: Messages, tools: Tools, *, sought: SoughtTexts) -> list[Place]:
    """Find the texts of a chat in `text`, its rendering by `render`, in the order of the chat."""
    listed = _Listed(sought)
    listed.replace_all(messages, tools)
    texts = listed.all
    used = set(text)
    # Only as many as there are texts: going through all of them takes longer than rendering.
    marks = list(islice((sign for sign in map(chr, range(*_MARKS)) if sign not in used), 2 * len(texts)))
    if 2 * len(texts) > len(marks):
        raise DataError(f"the chat has {len(texts)} texts, allowed are {len(marks) // 2}; shorten it")

    def attempt(chosen: Sequence[int], *, both: bool) -> dict[str, list[int]] | None:
        marked = render(*_Marked(sought, marks, chosen, both=both).replace_all(messages, tools))
        return None if marked is None else _positions(marked, text, set(marks))

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


def without_shared(text: str, other: str) -> str:
    """Return a text without the beginning that it shares with another, such as "c" of "abc" and "ab"."""
    return text[next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other))):]


def _squeezed(text: str) -> str:
    return "".join(text.split()).casefold()


class _Texts:
    """All texts of a chat and its tools, in order; `replaced` writes another in the place of each."""

    def replaced(self, message: int, kind: str, said: str) -> str:
        """Return the text to write for one; see `Place` for the arguments."""
        raise NotImplementedError

    def replace_all(self, messages: Messages, tools: Tools) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the chat and its tools with another text in the place of each."""
        return [self._message(index, message) for index, message in enumerate(messages)], [self._tool(tool) for tool in tools]

    def _message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(message)
        for key in REASONING:
            if isinstance(message.get(key), str):
                found[key] = self.replaced(index, "reasoning", message[key])
        content = message.get("content")
        if isinstance(content, str):
            found["content"] = self.replaced(index, "content", content)
        elif isinstance(content, Sequence):
            found["content"] = [
                {**part, "text": self.replaced(index, "content", part["text"])}
                if isinstance(part, Mapping) and isinstance(part.get("text"), str) else part for part in content]
        if calls := message.get("tool_calls"):
            found["tool_calls"] = [self._call(index, call) for call in calls]
        return found

    def _call(self, index: int, call: Mapping[str, Any]) -> dict[str, Any]:
        nested = isinstance(call.get("function"), Mapping)
        function = dict(call["function"] if nested else call)
        function["name"] = self.replaced(index, "call", function["name"])
        if "arguments" in function:
            function["arguments"] = self._value(index, function["arguments"])
        return {**call, "function": function} if nested else function

    def _value(self, index: int, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {self.replaced(index, "call", key): self._value(index, each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(index, each) for each in value]
        return self.replaced(index, "call", value) if isinstance(value, str) else value

    def _tool(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        nested = isinstance(tool.get("function"), Mapping)
        function = dict(tool["function"] if nested else tool)
        for key in ("name", "description"):
            if isinstance(function.get(key), str):
                function[key] = self.replaced(_TOOL, "tool", function[key])
        return {**tool, "function": function} if nested else function


class _Listed(_Texts):
    """The texts that are looked for, as (message, kind, text)."""

    def __init__(self, sought: SoughtTexts) -> None:
        self.all: list[tuple[int, str, str]] = []
        self._sought = sought

    def replaced(self, message: int, kind: str, said: str) -> str:
        if said.strip() and self._sought.includes(message, kind):
            self.all.append((message, kind, said))
        return said


class _Marked(_Texts):
    """The texts that are looked for, with a mark at the end of some of them, and at their beginning if `both`."""

    def __init__(self, sought: SoughtTexts, marks: Sequence[str], chosen: Sequence[int], *, both: bool) -> None:
        """`marks` are two for each text that is looked for; `chosen` are the numbers of those that are marked."""
        self._sought = sought
        self._marks = marks
        self._chosen = set(chosen)
        self._both = both
        self._numbers = count()

    def replaced(self, message: int, kind: str, said: str) -> str:
        if not said.strip() or not self._sought.includes(message, kind):
            return said
        number = next(self._numbers)
        if number not in self._chosen:
            return said
        core = said.strip()
        at = said.index(core)
        first, last = self._marks[2 * number : 2 * number + 2]
        return f"{said[:at]}{first if self._both else ''}{core}{last}{said[at + len(core):]}"
