"""Strict tools: a forced call keeps to the schema in every format that writes JSON, and is refused in the others."""

import json
from typing import Literal

import pytest

from chat.test_formats import parser_of
from offbeat.chat.formats import FORMATS
from offbeat.chat.messages import ChatRequest, Message, Tool
from offbeat.chat.rendering import Renderer
from offbeat.chat.strict import call_structure
from offbeat.engine.structure import Grammars
from offbeat.errors import RefusedError
from support.chat_templates import QWEN, tokenizer_with

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ADD, SUB, LOOSE = Tool("add", "", SCHEMA, strict=True), Tool("sub", "", SCHEMA, strict=True), Tool("loose", "", SCHEMA)
FORM = {form.name: form for form in FORMATS}
JSON = [form.name for form in FORMATS if form.completes is not None]
TOKENIZER = tokenizer_with(QWEN)


def structure(name: str, *tools: Tool, tool_name: str = "", choice: Literal["auto", "required"] = "required", special: str = ""):
    request = ChatRequest((Message("user", "x"),), tools, choice, tool_name)
    only = tool_name or (tools[0].name if len(tools) == 1 else "")
    return call_structure(FORM[name], request, tool_name=only, special_text_in=lambda _: special)


def accepted(grammar, text: str) -> bool:
    """Whether a text may be written, and end."""
    place = Grammars(TOKENIZER).compile(grammar).for_sample()
    for token in TOKENIZER.encode(text):
        if not place.allowed(TOKENIZER.vocab_size)[token]:
            return False
        place.push(token)
    return bool(place.allowed(TOKENIZER.vocab_size)[TOKENIZER.eos_token_id])


@pytest.mark.parametrize("name", JSON)
def test_the_arguments_of_a_named_tool_keep_to_its_schema_and_are_read_as_a_call(name: str) -> None:
    form, completes, grammar = FORM[name], FORM[name].completes or "", structure(name, ADD, SUB, tool_name="add")
    opening = Renderer(TOKENIZER, tool_format=name).opening("required", "add")
    for end in {"", "" if not form.closing.isascii() else form.closing}:
        text = '{"a": 3}' + completes + end
        assert accepted(grammar, text)
        parsed = parser_of(name).parse(text, [ADD], opening=opening, call_ids=lambda: "1")
        assert [(call.name, json.loads(call.arguments)) for call in parsed.message.calls] == [("add", {"a": 3})]
    for wrong in ('{"a": "x"}', "{}", '{"a": 3, "b": 1}', "3"):
        assert not accepted(grammar, wrong + completes)


@pytest.mark.parametrize("name", [name for name in JSON if FORM[name].some_call.isascii()])
def test_of_several_tools_each_keeps_to_its_own_schema_if_it_is_strict(name: str) -> None:
    form, completes, grammar = FORM[name], FORM[name].completes or "", structure(name, ADD, LOOSE)
    between = {tool: form.named_call.replace("{name}", tool).removeprefix(form.some_call) for tool in ("add", "loose", "other")}
    assert accepted(grammar, between["add"] + '{"a": 3}' + completes)
    assert not accepted(grammar, between["add"] + '{"z": 3}' + completes)
    assert accepted(grammar, between["loose"] + '{"z": 3}' + completes) and not accepted(grammar, between["other"] + "{}")


def test_calls_that_are_not_forced_and_tools_that_are_not_strict_have_no_form() -> None:
    assert structure("hermes", ADD, choice="auto") is None and structure("hermes", LOOSE) is None
    assert structure("hermes", ADD, LOOSE, tool_name="loose") is None and structure("glm", LOOSE) is None


@pytest.mark.parametrize("name", ["glm", "qwen-xml"])
def test_a_format_without_json_refuses_strict_tools(name: str) -> None:
    with pytest.raises(RefusedError, match=f"strict of tool 'add' cannot be kept, .* format is {name}"):
        structure(name, ADD)


def test_a_special_token_behind_the_names_of_several_tools_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"only where tool_choice names one tool, because this model writes \[ARGS\]"):
        structure("mistral-args", ADD, SUB, special="[ARGS]")
    assert structure("mistral-args", ADD, special="[ARGS]") is not None
