"""Answers that grow: however they are cut, their parts are those of the whole answer, told early and in linear time."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from chat.test_formats import CALL, SUM, WRITTEN
from chat.test_reading import PIECES
from offbeat.chat.formats import FORMATS
from offbeat.chat.messages import Piece, Said, ToolCall
from offbeat.chat.parsing import AnswerParser, message_of
from offbeat.chat.rendering import Renderer, tool_json
from offbeat.chat.splitting import joined
from support.chat_templates import QWEN, QWEN_THINKING, tokenizer_with

FORM = {form.name: form for form in FORMATS}
PARSERS = {
    (name, thinks): AnswerParser(Renderer(tokenizer_with(template), tool_format=name))
    for name in FORM for thinks, template in ((False, QWEN), (True, QWEN_THINKING))}
MORE = (
    "<think>", "</think>", "\n\n", "  ", "<", "<｜tool▁", "[TOOL", "<|", "\x00", "`", "{", "}", '{"name": "add_all", ', "[{", "f",
    *WRITTEN.values())
"""Texts that the pieces of `test_reading` lack: reasoning, halves of marks, and whole calls."""


def split(parser: AnswerParser, cuts: list[str], *, tools=(SUM,)) -> tuple[list[Piece], str]:
    """Return the parts of an answer, those of one kind put together, and why a call could not be read."""
    ids = iter(range(10**6))
    reader = parser.reader(tools, call_ids=lambda: str(next(ids)))
    pieces = [piece for cut in cuts for piece in reader.feed(cut)] + reader.finish()
    return joined(pieces), reader.malformed


def cut(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize("name", FORM)
@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.sampled_from((*PIECES, *MORE)), max_size=12), places=st.lists(st.integers(0, 10**6), max_size=9),
    thinks=st.booleans(), offers=st.booleans())
def test_the_parts_of_an_answer_are_the_same_however_it_is_cut(
    name: str, pieces: list[str], places: list[int], thinks: bool, offers: bool
) -> None:
    text, parser, tools = "".join(pieces), PARSERS[name, thinks], (SUM,) if offers else ()
    whole = split(parser, [text], tools=tools)
    assert split(parser, cut(text, places), tools=tools) == whole == split(parser, list(text), tools=tools)
    ids = iter(range(10**6))
    parsed = parser.parse(text, tools, call_ids=lambda: str(next(ids)))
    assert (parsed.message, parsed.malformed) == (message_of(whole[0]), whole[1])


@pytest.mark.parametrize("name", FORM)
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(("word", " ", "\n", *PIECES, *[*WRITTEN.values()] * 3)), max_size=9))
def test_whole_calls_and_what_is_around_them_are_what_transformers_reads(name: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    told, malformed = split(PARSERS[name, False], list(text))
    message = message_of(told)
    if malformed:  # transformers reads such an answer as a whole or not at all
        assert message.calls or "<|message|>" in text or message.content == text
        return
    read = parse_response(text, FORM[name].template, prefix="", tools=[tool_json(SUM)])
    assert [call.name for call in message.calls] == [call["function"]["name"].strip() for call in _flat(read.get("tool_calls", []))]
    if message.calls or read.get("content") or read.get("reasoning_content"):
        told = read.get("content", ""), read.get("reasoning_content", "")
        assert (_ink(message.content), _ink(message.reasoning)) == tuple(map(_ink, told))
    else:
        assert message.content == text


def _flat(calls: list) -> list:
    return [one if "function" in one else {"function": one} for call in calls
            for one in (call["function"] if isinstance(call["function"], list) else [call])]


def _ink(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("name", [name for name in FORM if name != "gpt-oss"])
def test_reasoning_and_text_are_told_at_once_and_a_call_when_it_ends(name: str) -> None:
    reader = PARSERS[name, False].reader([SUM], call_ids=lambda: "1")
    assert reader.feed("<think>\nI am") == [Said("reasoning", "I am")] and reader.feed(" sure\n") == [Said("reasoning", " sure")]
    assert reader.feed("</thi") == [] and reader.feed("nk>\n\n") == []
    if name == "llama3":  # calls stand at the beginning alone
        assert reader.feed("See <") == [Said("content", "See <")]
        return
    assert reader.feed("Let me") == [Said("content", "Let me")] and reader.feed(" see. ") == [Said("content", " see.")]
    most, close, tail = WRITTEN[name].partition(FORM[name].close or "no end")
    assert all(reader.feed(char) == [] for char in most + close[:-1])
    told = reader.feed(close[-1:]) or (reader.feed("\n[TOOL_CALLS]") if FORM[name].next_call else []) or reader.finish()
    assert isinstance(told[0], ToolCall) and json.loads(told[0].arguments)["note"] == "two\n  lines"
    if close:
        assert reader.feed(tail) == [] and reader.feed(" Done") == [Said("content", " Done")]
        assert reader.feed(" now\n") == [Said("content", " now")] and reader.finish() == []


def test_channels_are_told_as_they_come() -> None:
    reader = PARSERS["gpt-oss", False].reader([SUM], call_ids=lambda: "1")
    assert reader.feed("<|channel|>analysis<|message|> Two num") == [Said("reasoning", "Two num")]
    assert reader.feed("bers. <|end|><|start|>assistant<|channel|>fin") == [Said("reasoning", "bers.")]
    assert reader.feed("al<|message|>It is") == [Said("content", "It is")] and reader.feed(" 7 <|e") == [Said("content", " 7")]
    assert [type(piece) for piece in reader.feed("nd|>" + WRITTEN["gpt-oss"] + "<|call|>")] == [ToolCall] and reader.finish() == []


@pytest.mark.parametrize("name", ["hermes", "glm", "qwen-xml", "mistral-args", "deepseek", "gpt-oss"])
def test_calls_before_one_that_cannot_be_read_are_calls_and_the_rest_is_text(name: str) -> None:
    good, form = WRITTEN[name] + ("<|call|>" if name == "gpt-oss" else ""), FORM[name]
    broken = good.replace("3", "", 1).replace("</arg_key>", "", 1).replace("</parameter>", "", 1).replace('"a": ,', '"a": ,')
    told, malformed = split(PARSERS[name, False], [good + broken + good])
    assert isinstance(told[0], ToolCall) and malformed and form.name == name
    assert told[1:] == [Said("content", broken + good)]


@pytest.mark.parametrize(("name", "head", "piece", "tail"), [
    ("hermes", "a", " ", "b"), ("hermes", "", "<tool_call> ", ""), ("hermes", "<tool_call>", " ", "x"), ("hermes", "<think>", "\n", "x"),
    ("hermes", "", WRITTEN["hermes"], ""), ("hermes", '<tool_call>{"name": "', "a", ""), ("hermes", " ", " ", ""),
    ("gpt-oss", "", "<|channel|>analysis<|message|>x<|end|>", ""), ("gpt-oss", "", "<|channel|>", ""),
    ("gpt-oss", "<|channel|>final<|message|>x", " ", "x"), ("gpt-oss", "", "<|channel|>final<|message|><|end|>", ""),
    ("gpt-oss", "", "x<|message|>", ""), ("deepseek", f"{CALL}a", " ", ""), ("deepseek", f"{CALL}f<｜tool▁sep｜>{{}}", " ", "x"),
    ("deepseek", "", f"{CALL}f<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>", ""), ("deepseek", "", f"{CALL}a", ""),
    ("deepseek", f"{CALL}f<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>", " ", "x"), ("llama3", "", " ", ""), ("llama3", "{", " ", "x"),
    ("mistral-args", "", "[TOOL_CALLS]f[ARGS]{}", ""), ("mistral-args", "[TOOL_CALLS]", "f", ""), ("mistral", "[TOOL_CALLS][", " ", ""),
    ("glm", "<tool_call>", "f", ""), ("glm", "<tool_call>f", " ", ""), ("glm", "", "<tool_call>f\n", "")])
def test_an_answer_is_split_in_linear_time(name: str, head: str, piece: str, tail: str) -> None:
    # A time that grows with the square would pass any deadline. Each whole call is read by itself, which takes its time.
    text = head + piece * (((16 if "{}" in piece or '": ' in piece else 256) << 10) // len(piece)) + tail
    told, _ = split(PARSERS[name, False], [text[at : at + 5] for at in range(0, len(text), 5)])
    assert told == split(PARSERS[name, False], [text])[0]
