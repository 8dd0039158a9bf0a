"""The form of a forced call of a tool with `strict`: a grammar whose arguments a JSON schema accepts. Used by `answering`.

Only formats that write arguments as JSON have one. Torch-free, no I/O.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offbeat.chat.formats import ToolFormat
from offbeat.chat.messages import ChatRequest, Tool
from offbeat.chat.shaping import JSON_SPACE, Structure
from offbeat.errors import RefusedError

SpecialTextIn = Callable[[str], str]
"""Returns the first special token that a text contains; "" without one."""


def call_structure(form: ToolFormat, request: ChatRequest, *, tool_name: str, special_text_in: SpecialTextIn) -> Structure | None:
    """Return the form of an answer that begins with a forced call; None where no tool that may be called is strict.

    Args:
        tool_name: the only tool that may be called, whose name stands before the answer; empty if there are several.
        special_text_in: finds special tokens, which no grammar can spell.

    Raises:
        RefusedError: the format has no JSON, or the tool's name is not followed by plain text.
    """
    tools = [tool for tool in request.tools if tool_name in ("", tool.name)]
    strict = next((tool.name for tool in tools if tool.strict), None)
    if request.tool_choice != "required" or strict is None:
        return None
    if form.completes is None:
        raise RefusedError(
            f"strict of tool {strict!r} cannot be kept, because this model does not write arguments as JSON (its format is {form.name});"
            " leave strict out", param="tools")
    if not tool_name and (special := next(filter(None, (special_text_in(_between(form, tool)) for tool in tools)), "")):
        raise RefusedError(
            f"strict of tool {strict!r} can be kept only where tool_choice names one tool, because this model writes {special} behind the"
            " name; name one, or leave strict out", param="tool_choice")
    return Structure("grammar", "\n".join(_grammar(form, tools, named=bool(tool_name))))


def _grammar(form: ToolFormat, tools: Sequence[Tool], *, named: bool) -> Sequence[str]:
    closing = f" {_quoted(form.closing)}?" if form.closing else ""
    rules = [f"start: {' | '.join(f'call{at}' for at in range(len(tools)))}"]
    for at, tool in enumerate(tools):
        parts = ["" if named else _between(form, tool), form.completes or ""]
        before, after = (f"{_quoted(part)} " if part else "" for part in parts)
        rules.append(f"call{at}: {before}arguments{at} {after}{closing}")
        rules.append(f"arguments{at}: %json {json.dumps(_schema(tool), ensure_ascii=False)}")
    return rules


def _schema(tool: Tool) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments: any object if it is not strict."""
    given = dict(tool.parameters) if tool.strict else {}
    return {"type": "object", **given, "x-guidance": {"whitespace_pattern": JSON_SPACE}}


def _between(form: ToolFormat, tool: Tool) -> str:
    """Return the text between the beginning of any call and the arguments of this tool's, such as "add[ARGS]" for a tool "add"."""
    return form.named_call.replace("{name}", tool.name).removeprefix(form.some_call)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
