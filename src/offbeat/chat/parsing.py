"""A model's text to a message: its reasoning, what it says, and its calls. Called by the recorder of agents and the endpoints of chats.

Texts with calls are read by transformers' response templates: the tokenizer's own, else that of a format of `formats`. Whatever cannot be
read stays text, so nothing that a model has said is lost, and the reason is told. No I/O.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.chat.messages import Message, Tool, ToolCall
from offbeat.chat.reading import read_response
from offbeat.chat.rendering import Renderer, tool_json
from offbeat.errors import first_line

_THINK, _THOUGHT = "<think>", "</think>"
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Parsed:
    """What a text means.

    Attributes:
        malformed: what was wrong with a call that could not be read and is part of the message's text; empty if nothing was.
    """

    message: Message
    malformed: str = ""


class AnswerParser:
    """Reads the answers to prompts of one renderer."""

    def __init__(self, renderer: Renderer) -> None:
        self._format = renderer.format
        self._own = renderer.response_template
        self._prefix = renderer.generation_prompt
        self._head = _THINK if renderer.thinks_first else ""

    def parse(self, text: str, tools: Sequence[Tool], *, opening: str = "", call_ids: Callable[[], str]) -> Parsed:
        """Read an answer.

        Args:
            text: what was sampled, decoded with special tokens, without the token that ended it.
            tools: those that may be called; without any, nothing is a call.
            opening: what the answer was made to begin with; `text` continues it.
            call_ids: gives each call its id.
        """
        if self._own is not None:
            return self._read(self._own, self._prefix, opening + text, tools, call_ids)
        if self._format is not None and self._format.has_channels:
            return self._read(self._format.template, "", opening + text, tools, call_ids)
        reasoning, rest = _split_reasoning(self._head, opening + text)
        if self._format is None or not tools or not re.search(self._format.begins, rest):
            return Parsed(Message("assistant", rest, reasoning=reasoning))
        return self._read(self._format.template, "", rest, tools, call_ids, reasoning=reasoning)

    def _read(
        self,
        template: Mapping[str, Any],
        prefix: str,
        text: str,
        tools: Sequence[Tool],
        call_ids: Callable[[], str],
        *,
        reasoning: str = "",
    ) -> Parsed:
        described = [tool_json(tool) for tool in tools]
        try:
            self._check_balance(text)
            read = read_response(text, template, prefix=prefix, tools=described)
            reasoning = reasoning or next((str(read[field]) for field in _REASONING if read.get(field)), "")
            calls = _calls(read.get("tool_calls") or [], call_ids) if tools else ()
            content = str(read.get("content") or "").strip()
        except (ValueError, KeyError, TypeError, RecursionError) as exc:
            malformed = first_line(exc) if self._attempts(text) else ""
            return Parsed(Message("assistant", text, reasoning=reasoning), malformed)
        if not (calls or content or reasoning) or (read.get("tool_calls") and not calls):
            content = text  # it did not keep to the template at all, or calls what it was not given
        return Parsed(Message("assistant", content, calls, reasoning=reasoning))

    def _check_balance(self, text: str) -> None:
        for opened, closed in self._format.balanced if self._format is not None and self._own is None else ():
            marks = [match[0] for match in re.finditer(f"{re.escape(opened)}|{re.escape(closed)}", text)]
            if marks != [opened, closed] * (len(marks) // 2):
                raise ValueError(f"the call has a {opened} without its {closed}")

    def _attempts(self, text: str) -> bool:
        """Whether a text that could not be read holds a call, rather than a mention of its tags; a tokenizer's own tags mean a call."""
        return self._own is not None or self._format is None or re.search(self._format.begins, text) is not None


def _split_reasoning(head: str, text: str) -> tuple[str, str]:
    """Return the reasoning before an answer, without its tags, and the rest; `head` is what the template has written of the answer."""
    whole = head + text
    if not whole.lstrip().startswith(_THINK):
        return "", text
    reasoning, closed, rest = whole.lstrip().removeprefix(_THINK).partition(_THOUGHT)
    return reasoning.strip("\n"), rest.lstrip("\n") if closed else ""


def _calls(raw: Sequence[Any], call_ids: Callable[[], str]) -> tuple[ToolCall, ...]:
    """Check what a response template found.

    Raises:
        ValueError: something is no call; the message says what.
    """
    found: list[tuple[str, str]] = []
    for entry in raw:
        function = entry.get("function") if isinstance(entry, dict) else None
        for call in function if isinstance(function, list) else [function]:
            found.append(_call(call))
    return tuple(ToolCall(call_ids(), name, arguments) for name, arguments in found)


def _call(call: Any) -> tuple[str, str]:
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
    (name + text).encode()  # half a character, which JSON can spell, is none that can be answered
    return name.strip(), text
