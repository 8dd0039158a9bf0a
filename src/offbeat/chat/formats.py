"""How models write calls of tools: a table of formats, each with a response template of transformers that reads it.

A format is recognised by marks in the tokenizer's chat template, such as "[TOOL_CALLS]". `rendering` writes the first words of a forced
call, and `parsing` reads calls. `splitting` finds them in a text that grows, by the plain texts that stand for the format's patterns. We
write calls ourselves only in Hermes' format, into chats whose template knows no tools.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_WHOLE = {"type": "function", "function": "{content}"}
_REST = {"repeats": True, "join": "", "content": "text", "content_args": {"strip": False}}
_LINES = {"repeats": True, "join": "\n", "content": "text"}
_NEVER = "\x00"
"""Never matches: response templates must name the beginning of an assistant's message, but the parsed text begins behind it."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """One way to write calls.

    Attributes:
        name: its name for users, such as "hermes".
        marks: texts, one of which is in the chat templates of models that write this, such as "<arg_key>".
        opens: pattern of the beginning of a call, without white space before. Text that only mentions a tag does not match.
        starts: texts; each match of `opens` begins with one of them.
        at_start: whether a call stands only at the beginning of an answer.
        close: the last of a call's text; empty if a call has no end of its own.
        next_call: the text that begins the next call and so ends one; empty if calls have an end, or the first takes all that follows.
        tail: text that may follow calls and belongs to them, such as "</tool_call>".
        channels: patterns of the beginning of messages of reasoning and of content; empty where reasoning stands between <think> and
            </think> before the answer.
        fields: the fields of a response template (see `transformers.utils.chat_parsing`); `content` is all text besides calls.
        balanced: pairs of texts that alternate in whole calls, where a cut call could pass for a whole one.
        some_call: the beginning of a call up to the tool's name, e.g. "[TOOL_CALLS]".
        named_call: the beginning of a call with the tool's name, e.g. "[TOOL_CALLS]{name}[ARGS]".
        completes: the text that completes a call behind its arguments, such as "}"; None where they are not written as one JSON text.
        closing: optional text behind `completes`.
        end: the text that ends a call; a sample that stops there has one call. Empty if nothing does.
        id_chars: number of letters and digits that templates require of each call's id; 0 if none.
    """

    name: str
    marks: tuple[str, ...]
    opens: str
    fields: Mapping[str, Any]
    starts: tuple[str, ...] = ()
    at_start: bool = False
    close: str = ""
    next_call: str = ""
    tail: str = ""
    channels: Mapping[str, str] = field(default_factory=dict)
    balanced: tuple[tuple[str, str], ...] = ()
    some_call: str
    named_call: str
    completes: str | None = None
    closing: str = ""
    end: str = ""
    id_chars: int = 0

    @property
    def template(self) -> dict[str, Any]:
        return {"start_anchor": _NEVER, "fields": dict(self.fields)}


def _fields(opens: str, *, before: str = r"(?:(?<!\s)\s*+)?", **call: Any) -> dict[str, Any]:
    """Return the fields of answers with calls among the text; `before` is the pattern of white space before a call, part of the call."""
    return {"tool_calls": {"open_pattern": before + opens, "repeats": True, **call}, "content": _REST}


# A pattern takes linear time on any text: white space belongs to a call from its first character on, and a run followed by another is
# possessive (`*+`, `++`). Tried from each character, or at each division of a run, it would take quadratic time.
_HERMES = r"<tool_call>\s*(?=[\[{])"
_XML = r"<tool_call>\s*<function=(?P<name>[^>\n]+)>"
_LLAMA = r'(?:<\|python_tag\|>\s*+)?(?=\{\s*"(?:type|name|function)"\s*:)'
_MISTRAL = r"\[TOOL_CALLS\]\s*(?=\[\s*\{)"
_MISTRAL_ARGS = r"\[TOOL_CALLS\]\s*(?P<name>[\w.\-]+)(?:\[CALL_ID\][\w\-]+)?\[ARGS\]\s*"
_GLM = r"<tool_call>\s*(?P<name>[\w.\-]+)(?=\s*(?:<arg_key>|</tool_call>|\Z))"
_DEEPSEEK = (
    r"(?:<｜tool▁calls▁begin｜>\s*+)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>(?:[^\n<`]|`(?!``json\s))++)"
    r"(?:<｜tool▁sep｜>|\s*+```json\s)")
_DEEPSEEK_END = r"(?:(?<!\s)\s*+(?:```\s*+)?)?<｜tool▁call▁end｜>(?:\s*+<｜tool▁calls▁end｜>)?"
_MISTRAL_NEXT = r"(?<!\s)(?=\s*+\[TOOL_CALLS\])|(?=\[TOOL_CALLS\])"
_GLM_ARGUMENT = (
    r"<arg_key>\s*+(?P<key>(?:[^\s<]|\s++(?!</arg_key>)|<(?!/arg_key>))*+)\s*+</arg_key>\s*+<arg_value>(?P<value>.*?)</arg_value>")
_OSS = (
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? to=functions\.(?P<name>[\w.\-]+)"
    r"(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>\s*\w+)?<\|message\|>"
)
_OSS_CHANNELS = {
    "reasoning": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
    "content": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>"}

HERMES = ToolFormat(
    name="hermes", marks=("<tool_call>",), opens=_HERMES, starts=("<tool_call>",), close="</tool_call>",
    fields=_fields(_HERMES, close="</tool_call>", content="json", transform=_WHOLE),
    some_call='<tool_call>\n{"name": "', named_call='<tool_call>\n{"name": "{name}", "arguments": ', completes="}",
    closing="\n</tool_call>", end="</tool_call>",
)

FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        name="gpt-oss", marks=("<|channel|>",), opens=_OSS, close="<|call|>", channels=_OSS_CHANNELS,
        fields={
            "reasoning_content": {
                "open_pattern": _OSS_CHANNELS["reasoning"], "close_pattern": r"<\|end\|>|(?=<\|start\|>)", **_LINES},
            "tool_calls": {"open_pattern": _OSS, "close": "<|call|>", "repeats": True, "content": "json", "transform": _NAMED},
            "content": {
                "open_pattern": _OSS_CHANNELS["content"], "close_pattern": r"<\|end\|>|<\|return\|>|(?=<\|start\|>)", **_LINES}},
        some_call="<|channel|>commentary to=functions.",
        named_call="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", completes="", end="<|call|>",
    ),
    ToolFormat(
        name="deepseek", marks=("<｜tool▁call▁begin｜>",), opens=_DEEPSEEK, starts=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        close="<｜tool▁call▁end｜>", tail="<｜tool▁calls▁end｜>",
        fields=_fields(
            _DEEPSEEK, close_pattern=_DEEPSEEK_END, content="json", transform=_NAMED),
        some_call="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        named_call="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n", completes="",
        closing="\n```<｜tool▁call▁end｜>", end="<｜tool▁call▁end｜>",
    ),
    ToolFormat(
        name="glm", marks=("<arg_key>",), opens=_GLM, starts=("<tool_call>",), close="</tool_call>", balanced=(
            ("<tool_call>", "</tool_call>"), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")),
        fields=_fields(
            _GLM, close="</tool_call>", content="xml-inline", transform=_NAMED, content_args={
                "tag_pattern": _GLM_ARGUMENT}),
        some_call="<tool_call>", named_call="<tool_call>{name}\n", end="</tool_call>",
    ),
    ToolFormat(
        name="qwen-xml", marks=("<function=",), opens=_XML, starts=("<tool_call>",), close="</function>",
        tail="</tool_call>", balanced=(("<function=", "</function>"), ("<parameter=", "</parameter>")),
        fields=_fields(
            _XML, close_pattern=r"</function>\s*(?:</tool_call>)?", content="xml-inline", transform=_NAMED, content_args={
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"}),
        some_call="<tool_call>\n<function=", named_call="<tool_call>\n<function={name}>\n", end="</tool_call>",
    ),
    ToolFormat(
        name="mistral-args", marks=("[ARGS]",), opens=_MISTRAL_ARGS, starts=("[TOOL_CALLS]",), next_call="[TOOL_CALLS]", id_chars=9,
        fields=_fields(_MISTRAL_ARGS, close_pattern=_MISTRAL_NEXT, content="json", transform=_NAMED),
        some_call="[TOOL_CALLS]", named_call="[TOOL_CALLS]{name}[ARGS]", completes="",
    ),
    ToolFormat(
        name="mistral", marks=("[TOOL_CALLS]",), opens=_MISTRAL, starts=("[TOOL_CALLS]",), id_chars=9,
        fields=_fields(_MISTRAL, content="json", transform=_WHOLE),
        some_call='[TOOL_CALLS] [{"name": "', named_call='[TOOL_CALLS] [{"name": "{name}", "arguments": ',
        completes="}]",
    ),
    HERMES,
    ToolFormat(
        name="llama3", marks=("<|python_tag|>", "ipython"), opens=_LLAMA, starts=("<|python_tag|>", "{"), at_start=True,
        fields=_fields(_LLAMA, before=r"\A\s*+", content="json", transform=_WHOLE),
        some_call='{"name": "', named_call='{"name": "{name}", "parameters": ', completes="}",
    ),
)
"""In the order of search: a template may contain the marks of several, and the first is the most particular."""


def recognise(chat_template: str) -> ToolFormat | None:
    """Return the format that models with this chat template write; None if it is none of the table's."""
    return next((form for form in FORMATS if any(mark in chat_template for mark in form.marks)), None)
