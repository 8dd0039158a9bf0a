"""What a model's text means: reasoning, prose, calls, and what only looks like a call."""

import json
import os
import subprocess
import sys

import pytest

from offbeat.chat.messages import Message, Tool
from offbeat.chat.parsing import AnswerParser, Parsed
from offbeat.chat.rendering import Renderer
from support.chat_templates import QWEN, QWEN_THINKING, tokenizer_with

ADD = Tool("add", "Add.", {"type": "object", "properties": {"a": {"type": "integer"}}})


def parse(text: str, *, template: str = QWEN, tools=(ADD,), opening: str = "", own=None) -> Parsed:
    tokenizer = tokenizer_with(template)
    if own is not None:
        tokenizer.hf.response_template = own
    ids = iter("abcdef")
    return AnswerParser(Renderer(tokenizer)).parse(text, tools, opening=opening, call_ids=lambda: next(ids))


def call(arguments: str = '{"a": 3}', name: str = '"add"') -> str:
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def test_text_without_calls_stays_as_it_is() -> None:
    assert parse("  seven\n") == Parsed(Message("assistant", "  seven\n"))


def test_prose_that_mentions_the_tag_stays_prose() -> None:
    text = "Calls stand between <tool_call> and </tool_call>, as you know."
    assert parse(text) == Parsed(Message("assistant", text))
    assert parse(f"I write <tool_call> now: {call()}").message.content == "I write <tool_call> now:"


def test_long_runs_of_white_space_are_read_in_linear_time() -> None:
    text = "seven" + " " * 300_000 + "eight"  # a time that grows with the square would pass any deadline
    assert parse(text) == Parsed(Message("assistant", text))


def test_without_tools_nothing_is_a_call() -> None:
    assert parse(call(), tools=()) == Parsed(Message("assistant", call()))


@pytest.mark.parametrize(("text", "why"), [
    ('<tool_call>{"name": "add", "argum', "json parser could not"), (call("[1]"), "must be an object, got list"),
    (call(name="7"), "must name its tool"), (call(name='" "'), "must name its tool"), (call('{"a": NaN}'), "not JSON compliant"),
    (call('{"a": "\\ud800"}'), "surrogates not allowed"), (call("{") + call(), "json parser could not"),
    (call("[" * 4000), "")])
def test_a_call_that_cannot_be_read_is_marked_and_stays_text_with_all_that_follows(text, why) -> None:
    parsed = parse("Well. " + text)
    assert parsed.message == Message("assistant", "Well. " + text) and parsed.malformed and why in parsed.malformed
    before = parse(f"Well. {call()} {text}")
    assert before.message.content == f"Well. {text}" and len(before.message.calls) == 1 and before.malformed == parsed.malformed


@pytest.mark.parametrize(("text", "reasoning", "content"), [
    ("<think>\nhm\n</think>\n\nseven", "hm", "seven"), ("<think>hm", "hm", ""), ("seven <think>", "", "seven <think>"),
    ("<think></think>seven", "", "seven")])
def test_reasoning_is_what_stands_in_its_tags_before_the_answer(text, reasoning, content) -> None:
    assert parse(text).message == Message("assistant", content, reasoning=reasoning)


def test_reasoning_may_be_begun_by_the_template() -> None:
    assert parse("hm\n</think>\n\nseven", template=QWEN_THINKING).message == Message("assistant", "seven", reasoning="hm")
    assert parse("hm", template=QWEN_THINKING).message == Message("assistant", "", reasoning="hm")


def test_a_call_after_reasoning_is_read_and_one_within_it_is_not() -> None:
    parsed = parse(f"<think>{call()}</think>\n\n{call()}")
    assert len(parsed.message.calls) == 1 and parsed.message.reasoning == call()


def test_a_forced_call_continues_its_beginning() -> None:
    renderer = Renderer(tokenizer_with(QWEN_THINKING))
    opening = renderer.opening("required", "add")
    parsed = parse('{"a": 3}}\n</tool_call>', template=QWEN_THINKING, opening=opening)
    assert [c.arguments for c in parsed.message.calls] == ['{"a": 3}'] and parsed.message.reasoning == ""
    cut = parse('{"a": ', opening='<tool_call>\n{"name": "add", "arguments": ')
    assert cut.message.content == '<tool_call>\n{"name": "add", "arguments": {"a": ' and cut.malformed


def test_a_list_of_calls_and_arguments_in_a_string_are_understood() -> None:
    text = '<tool_call>[{"name": "add", "arguments": "{\\"a\\": 1}"}, {"name": "other"}]</tool_call>'
    assert [(c.id, c.name, c.arguments) for c in parse(text).message.calls] == [("a", "add", '{"a": 1}'), ("b", "other", "{}")]


OWN = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<call>", "close": "</call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"}},
        "content": {"content": "text"}}}


def test_a_tokenizers_own_response_template_goes_first() -> None:
    parsed = parse('hm</think><call>{"name": "add", "arguments": {"a": 3}}</call>', template=QWEN_THINKING, own=OWN)
    assert parsed.message.reasoning == "hm" and [json.loads(c.arguments) for c in parsed.message.calls] == [{"a": 3}]
    broken = parse("x <call>{", own=OWN)
    assert broken.message.content == "x <call>{" and broken.malformed


def test_parsing_imports_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import offbeat.chat.parsing, offbeat.chat.rendering, offbeat.chat.completions, offbeat.chat.responses, offbeat.chat.anthropic\n"
        "from transformers.utils.chat_parsing import parse_response\n"
        "parse_response('<c>{}', {'start_anchor': 'x', 'fields': {'a': {'open': '<c>', 'content': 'json'}}}, prefix='')\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ), timeout=100, check=False)
    assert done.returncode == 0, done.stderr
