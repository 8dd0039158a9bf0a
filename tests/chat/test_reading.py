"""Texts of many fields are read as transformers reads them, and in time that grows with the text alone."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from offbeat.chat.formats import FORMATS
from offbeat.chat.reading import read_response

FORM = {form.name: form for form in FORMATS}
PIECES = (
    "<|start|>assistant", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|return|>", "<|call|>",
    "<|channel|>commentary to=functions.add<|message|>", '{"a": 1}', " ", "\n", "word", "<tool_call>", "</tool_call>",
    '{"name": "add", "arguments": {"a": 1}}', "<tool_call>add\n", "<arg_key>a</arg_key>", "<arg_value>1</arg_value>", "<function=add>",
    "</function>", "<parameter=a>\n1\n</parameter>", "[TOOL_CALLS]", "[ARGS]", "add", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜>",
    "function<｜tool▁sep｜>add\n```json\n", "add<｜tool▁sep｜>", "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|python_tag|>")
OWN = {  # a tokenizer's own, with a field that is not in brackets and joins what it reads
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text", "repeats": True, "join": "\n"},
        "tool_calls": {"open": "<call>", "close": "</call>", "content": "json", "repeats": True},
        "content": {"repeats": True, "join": "", "content": "text", "content_args": {"strip": False}}}}
OWN_PIECES = ("<think>", "</think>", "<call>", "</call>", "{}", '{"a": 1}', " ", "word", "<|assistant|>")


def outcome(read: Any, text: str, template: dict[str, Any], prefix: str) -> Any:
    try:
        return read(text, template, prefix=prefix, tools=[])
    except (ValueError, KeyError, TypeError) as exc:
        return type(exc)


@pytest.mark.parametrize("form", FORM)
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=14))
def test_a_text_is_read_as_transformers_reads_it(form: str, pieces: list[str]) -> None:
    text, template = "".join(pieces), FORM[form].template
    assert outcome(read_response, text, template, "") == outcome(parse_response, text, template, "")


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(OWN_PIECES), max_size=14), prefix=st.sampled_from(["", "x<|assistant|>", "x<|assistant|><think>"]))
def test_so_it_is_with_a_template_of_the_tokenizers_own_and_an_answer_that_the_prompt_began(pieces: list[str], prefix: str) -> None:
    text = "".join(pieces)
    assert outcome(read_response, text, OWN, prefix) == outcome(parse_response, text, OWN, prefix)


def test_many_fields_take_linear_time() -> None:
    thought = "<|channel|>analysis<|message|>x<|end|>" * 20_000  # a time that grows with the square would pass any deadline
    assert read_response(thought, FORM["gpt-oss"].template, prefix="", tools=[]) == {"reasoning_content": "\n".join(["x"] * 20_000)}
    assert len(read_response("<call>{}</call>" * 20_000, OWN, prefix="", tools=[])["tool_calls"]) == 20_000
