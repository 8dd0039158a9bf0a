"""A model's text to a message: its reasoning, its answer, and its calls. Called by the recorder of agents and the endpoints of chats.

Calls are read by transformers' response templates: the tokenizer's own, or one of `formats`, for which `splitting` finds calls, text and
reasoning while the answer grows. A call that cannot be read stays text, so nothing is lost, and the reason is given. No I/O.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from offbeat.chat.messages import Message, Piece, Said, Tool, ToolCall, pieces_of
from offbeat.chat.reading import read_response
from offbeat.chat.rendering import Renderer, tool_json
from offbeat.chat.splitting import ChannelSplitter, TagSplitter
from offbeat.errors import first_line

CallIds = Callable[[], str]
"""Returns a new id for a call of a tool."""

_UNREADABLE = (ValueError, KeyError, TypeError, RecursionError)
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Parsed:
    """A text as a message; `malformed` is the fault of a call that could not be read and is part of the message's text, else empty."""

    message: Message
    malformed: str = ""


class AnswerReader(Protocol):
    """Reads one answer as it grows; `malformed` is as in `Parsed`."""

    malformed: str

    def feed(self, text: str) -> list[Piece]:
        """Add text; returns the pieces that are certain now."""
        ...

    def finish(self) -> list[Piece]:
        """Return the rest of a whole answer."""
        ...


class AnswerParser:
    """Reads the answers to prompts of one renderer."""

    def __init__(self, renderer: Renderer) -> None:
        self._format = renderer.format
        self._own = renderer.response_template
        self._prefix = renderer.generation_prompt
        self._template = load_response_template(self._format.template) if self._format is not None else None
        self._begins_with_thought = renderer.thinks_first

    def parse(self, text: str, tools: Sequence[Tool], *, opening: str = "", call_ids: CallIds) -> Parsed:
        """Read a whole answer.

        Args:
            text: the sample, decoded with special tokens, without the token that ended it.
            tools: those that may be called; without any, nothing is a call.
            opening: the forced beginning of the answer, such as "<tool_call>"; `text` continues it.
        """
        reader = self.reader(tools, call_ids=call_ids)
        pieces = [*reader.feed(opening), *reader.feed(text), *reader.finish()]
        return Parsed(message_of(pieces), reader.malformed)

    def reader(self, tools: Sequence[Tool], *, call_ids: CallIds) -> AnswerReader:
        """Return a reader of one answer, which is fed the answer's opening first."""
        described = [tool_json(tool) for tool in tools]
        if self._own is not None:
            return _OwnReader(self._own, self._prefix, described, call_ids)
        form, template = self._format, self._template
        read_calls = None
        if form is not None and template is not None and tools:
            read_calls = partial(_read_calls, template, form.balanced, described, call_ids)
        if form is not None and form.channels:
            return ChannelSplitter(form, read_calls)
        return TagSplitter(form, read_calls, begins_with_thought=self._begins_with_thought)


class _OwnReader:
    """Reads a whole answer by the tokenizer's own response template, whose patterns may be of any kind."""

    def __init__(self, template: Mapping[str, Any], prefix: str, tools: Sequence[Mapping[str, Any]], call_ids: CallIds) -> None:
        self.malformed = ""
        self._template, self._prefix, self._tools, self._call_ids = template, prefix, tools, call_ids
        self._texts: list[str] = []

    def feed(self, text: str) -> list[Piece]:
        self._texts.append(text)
        return []

    def finish(self) -> list[Piece]:
        text = "".join(self._texts)
        try:
            read = read_response(text, self._template, prefix=self._prefix, tools=self._tools)
            calls = _calls(read.get("tool_calls") or [], self._call_ids) if self._tools else ()
        except _UNREADABLE as exc:
            self.malformed = first_line(exc)
            return pieces_of("", text, ())
        reasoning = next((str(read[field]) for field in _REASONING if read.get(field)), "")
        content = str(read.get("content") or "").strip()
        if not (calls or content or reasoning) or (read.get("tool_calls") and not calls):
            content = text  # it did not keep to the template at all, or calls tools that it was not given
        return pieces_of(reasoning, content, calls)


def message_of(pieces: Iterable[Piece]) -> Message:
    """Put the pieces of an answer together."""
    said: dict[str, list[str]] = {"reasoning": [], "content": []}
    calls: list[ToolCall] = []
    for piece in pieces:
        if isinstance(piece, Said):
            said[piece.kind].append(piece.text)
        else:
            calls.append(piece)
    return Message("assistant", "".join(said["content"]), tuple(calls), reasoning="".join(said["reasoning"]))


def _read_calls(
    template: ResponseTemplate, balanced: Sequence[tuple[str, str]], tools: Sequence[Mapping[str, Any]], call_ids: CallIds, text: str,
) -> tuple[ToolCall, ...]:
    """Read the text of one call, by the template of its format; raises ValueError, which says why, if it cannot be read."""
    try:
        _check_balance(balanced, text)
        return _calls(read_response(text, template, prefix="", tools=tools).get("tool_calls") or [], call_ids)
    except _UNREADABLE as exc:
        raise ValueError(first_line(exc)) from exc


def _check_balance(balanced: Sequence[tuple[str, str]], text: str) -> None:
    for opened, closed in balanced:
        marks = [match[0] for match in re.finditer(f"{re.escape(opened)}|{re.escape(closed)}", text)]
        if marks != [opened, closed] * (len(marks) // 2):
            raise ValueError(f"the call has a {opened} without its {closed}")


def _calls(raw: Sequence[Any], call_ids: CallIds) -> tuple[ToolCall, ...]:
    """Check the calls that a response template found; raises ValueError, which names what is no call."""
    found: list[tuple[str, str]] = []
    for entry in raw:
        function = entry.get("function") if isinstance(entry, dict) else None
        for call in function if isinstance(function, list) else [function]:
            found.append(_read_call(call))
    return tuple(ToolCall(call_ids(), name, arguments) for name, arguments in found)


def _read_call(call: Any) -> tuple[str, str]:
    if not isinstance(call, dict):
        raise ValueError(f"a call must be an object, got {type(call).__name__}")
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a call must name its tool")
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name.strip()!r} must be an object, got {type(arguments).__name__}")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + text).encode()  # JSON can spell half a character, such as a lone surrogate, but no answer can be encoded with it
    return name.strip(), text
