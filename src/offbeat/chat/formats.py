"""How models write calls of tools: a table of formats, each with a response template of transformers that reads it.

A format is recognised by what the tokenizer's chat template contains. `rendering` writes the first words of a call that is forced, and
`parsing` reads calls. Only Hermes' format is also written by us, into chats whose template knows no tools.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_WHOLE = {"type": "function", "function": "{content}"}
_REST = {"repeats": True, "join": "", "content": "text", "content_args": {"strip": False}}
_NEVER = "\x00"
"""What begins an assistant's message, which response templates must name: the text that is parsed begins there already."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """One way to write calls.

    Attributes:
        name: what users call it.
        marks: texts of which one is in the chat templates of models that write this.
        begins: pattern of where a call begins. Text that only mentions a tag does not match.
        fields: the fields of a response template (see `transformers.utils.chat_parsing`); `content` is whatever is no call.
        balanced: pairs of texts that alternate in whole calls, where a cut call could pass for a whole one.
        some_call: what a call begins with, before the tool's name.
        named_call: the same with the tool's name, for which `{name}` stands.
        end: what ends a call; a sample that stops there has one call. Empty if nothing does.
        has_channels: the reasoning is one of the fields; else it stands between <think> and </think> before the answer.
        id_chars: number of letters and digits of each call's id, where templates insist; 0 if they do not.
    """

    name: str
    marks: tuple[str, ...]
    begins: str
    fields: Mapping[str, Any]
    balanced: tuple[tuple[str, str], ...] = ()
    some_call: str
    named_call: str
    end: str = ""
    has_channels: bool = False
    id_chars: int = 0

    @property
    def template(self) -> dict[str, Any]:
        return {"start_anchor": _NEVER, "fields": dict(self.fields)}


def _fields(begins: str, **call: Any) -> dict[str, Any]:
    return {"tool_calls": {"open_pattern": begins, "repeats": True, **call}, "content": _REST}


# Whatever a model writes, a pattern takes linear time: white space belongs to a call from its first character on, and a run followed by
# another is possessive (`*+`, `++`). Tried from each character, or at each division of a run, it would take quadratic time.
_HERMES = r"(?<!\s)\s*<tool_call>\s*(?=[\[{])"
_XML = r"(?<!\s)\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>"
_LLAMA = r'\A\s*+(?:<\|python_tag\|>\s*+)?(?=\{\s*"(?:type|name|function)"\s*:)'
_MISTRAL = r"(?<!\s)\s*\[TOOL_CALLS\]\s*(?=\[\s*\{)"
_MISTRAL_ARGS = r"(?<!\s)\s*\[TOOL_CALLS\]\s*(?P<name>[\w.\-]+)(?:\[CALL_ID\][\w\-]+)?\[ARGS\]\s*"
_GLM = r"(?<!\s)\s*<tool_call>\s*(?P<name>[\w.\-]+)(?=\s*(?:<arg_key>|</tool_call>|\Z))"
_DEEPSEEK = (
    r"(?:(?<!\s)\s*+)?(?:<｜tool▁calls▁begin｜>\s*+)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>(?:[^\n<`]|`(?!``json\s))++)"
    r"(?:<｜tool▁sep｜>|\s*+```json\s)")
_DEEPSEEK_END = r"(?:(?<!\s)\s*+(?:```\s*+)?)?<｜tool▁call▁end｜>(?:\s*+<｜tool▁calls▁end｜>)?"
_MISTRAL_NEXT = r"(?<!\s)(?=\s*+\[TOOL_CALLS\])|(?=\[TOOL_CALLS\])"
_GLM_ARGUMENT = (
    r"<arg_key>\s*+(?P<key>(?:[^\s<]|\s++(?!</arg_key>)|<(?!/arg_key>))*+)\s*+</arg_key>\s*+<arg_value>(?P<value>.*?)</arg_value>")
_OSS = (
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)? to=functions\.(?P<name>[\w.\-]+)"
    r"(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>\s*\w+)?<\|message\|>"
)

HERMES = ToolFormat(
    name="hermes", marks=("<tool_call>",), begins=_HERMES,
    fields=_fields(_HERMES, close="</tool_call>", content="json", transform=_WHOLE),
    some_call='<tool_call>\n{"name": "', named_call='<tool_call>\n{"name": "{name}", "arguments": ', end="</tool_call>",
)

FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        name="gpt-oss", marks=("<|channel|>",), begins=_OSS, has_channels=True,
        fields={
            "reasoning_content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                "close_pattern": r"<\|end\|>|(?=<\|start\|>)", "repeats": True, "join": "\n", "content": "text"},
            "tool_calls": {"open_pattern": _OSS, "close": "<|call|>", "repeats": True, "content": "json", "transform": _NAMED},
            "content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>",
                "close_pattern": r"<\|end\|>|<\|return\|>|(?=<\|start\|>)", "repeats": True, "join": "\n", "content": "text"}},
        some_call="<|channel|>commentary to=functions.",
        named_call="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", end="<|call|>",
    ),
    ToolFormat(
        name="deepseek", marks=("<｜tool▁call▁begin｜>",), begins=_DEEPSEEK,
        fields=_fields(
            _DEEPSEEK, close_pattern=_DEEPSEEK_END, content="json", transform=_NAMED),
        some_call="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        named_call="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n", end="<｜tool▁call▁end｜>",
    ),
    ToolFormat(
        name="glm", marks=("<arg_key>",), begins=_GLM, balanced=(
            ("<tool_call>", "</tool_call>"), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")),
        fields=_fields(
            _GLM, close="</tool_call>", content="xml-inline", transform=_NAMED, content_args={
                "tag_pattern": _GLM_ARGUMENT}),
        some_call="<tool_call>", named_call="<tool_call>{name}\n", end="</tool_call>",
    ),
    ToolFormat(
        name="qwen-xml", marks=("<function=",), begins=_XML, balanced=(("<function=", "</function>"), ("<parameter=", "</parameter>")),
        fields=_fields(
            _XML, close_pattern=r"</function>\s*(?:</tool_call>)?", content="xml-inline", transform=_NAMED, content_args={
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"}),
        some_call="<tool_call>\n<function=", named_call="<tool_call>\n<function={name}>\n", end="</tool_call>",
    ),
    ToolFormat(
        name="mistral-args", marks=("[ARGS]",), begins=_MISTRAL_ARGS, id_chars=9,
        fields=_fields(_MISTRAL_ARGS, close_pattern=_MISTRAL_NEXT, content="json", transform=_NAMED),
        some_call="[TOOL_CALLS]", named_call="[TOOL_CALLS]{name}[ARGS]",
    ),
    ToolFormat(
        name="mistral", marks=("[TOOL_CALLS]",), begins=_MISTRAL, id_chars=9,
        fields=_fields(_MISTRAL, content="json", transform=_WHOLE),
        some_call='[TOOL_CALLS] [{"name": "', named_call='[TOOL_CALLS] [{"name": "{name}", "arguments": ',
    ),
    HERMES,
    ToolFormat(
        name="llama3", marks=("<|python_tag|>", "ipython"), begins=_LLAMA,
        fields=_fields(_LLAMA, content="json", transform=_WHOLE),
        some_call='{"name": "', named_call='{"name": "{name}", "parameters": ',
    ),
)
"""In the order in which they are looked for: a template may contain the marks of several, and the first is the most particular."""


def recognise(chat_template: str) -> ToolFormat | None:
    """Return the format that models with this chat template write; None if it is none of the table's."""
    return next((form for form in FORMATS if any(mark in chat_template for mark in form.marks)), None)
