"""The table of formats: each reads what its models write, and is recognised by their templates."""

import json

import pytest

from offbeat.chat.formats import FORMATS, HERMES, recognise
from offbeat.chat.messages import Tool
from offbeat.chat.parsing import AnswerParser
from offbeat.chat.rendering import Renderer
from support.chat_templates import QWEN, tokenizer_with

SUM = Tool("add_all", "Add.", {"type": "object", "properties": {
    "a": {"type": "integer"}, "b": {"type": "number"}, "words": {"type": "array"}, "note": {"type": "string"}}})
WANTED = {"a": 3, "b": 1.5, "words": ["x", "y"], "note": "two\n  lines"}
JSON = json.dumps(WANTED)
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "add_all", "arguments": {JSON}}}\n</tool_call>',
    "qwen-xml": (
        "<tool_call>\n<function=add_all>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n1.5\n</parameter>\n"
        '<parameter=words>\n["x", "y"]\n</parameter>\n<parameter=note>\ntwo\n  lines\n</parameter>\n</function>\n</tool_call>'),
    "glm": (
        "<tool_call>add_all\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n<arg_key>b</arg_key>\n<arg_value>1.5</arg_value>\n"
        '<arg_key>words</arg_key>\n<arg_value>["x", "y"]</arg_value>\n<arg_key>note</arg_key>\n'
        "<arg_value>two\n  lines</arg_value>\n</tool_call>"),
    "mistral": f'[TOOL_CALLS] [{{"name": "add_all", "arguments": {JSON}, "id": "abcdefghi"}}]',
    "mistral-args": f"[TOOL_CALLS]add_all[ARGS]{JSON}",
    "llama3": f'{{"name": "add_all", "parameters": {JSON}}}',
    "deepseek": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add_all\n```json\n{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    "gpt-oss": f"<|channel|>commentary to=functions.add_all <|constrain|>json<|message|>{JSON}",
}
"""A call of one tool, as a model of each kind writes it."""


def parser_of(name: str) -> AnswerParser:
    return AnswerParser(Renderer(tokenizer_with(QWEN), tool_format=name))


def read(name: str, text: str, **kwargs):
    ids = iter("abcdefgh")
    return parser_of(name).parse(text, [SUM], call_ids=lambda: next(ids), **kwargs)


@pytest.mark.parametrize("name", [form.name for form in FORMATS])
def test_a_call_is_read(name) -> None:
    parsed = read(name, WRITTEN[name])
    assert not parsed.malformed and parsed.message.content == ""
    (call,) = parsed.message.calls
    assert (call.id, call.name, json.loads(call.arguments)) == ("a", "add_all", WANTED)


@pytest.mark.parametrize("name", [form.name for form in FORMATS])
def test_a_call_is_read_wherever_its_forced_beginning_ends(name) -> None:
    renderer = Renderer(tokenizer_with(QWEN), tool_format=name)
    for opening in (renderer.opening("required"), renderer.opening("required", "add_all")):
        assert opening and WRITTEN[name].startswith(opening)
        parsed = read(name, WRITTEN[name].removeprefix(opening), opening=opening)
        assert [json.loads(call.arguments) for call in parsed.message.calls] == [WANTED] and not parsed.malformed


@pytest.mark.parametrize("name", [form.name for form in FORMATS])
def test_a_call_that_was_cut_stays_text_and_is_marked(name) -> None:
    cut = WRITTEN[name][: WRITTEN[name].index("1.5") + 2]
    parsed = read(name, cut)
    assert parsed.message.calls == () and parsed.malformed
    assert parsed.message.content == cut


@pytest.mark.parametrize("name", ["hermes", "qwen-xml", "glm", "mistral-args"])
def test_several_calls_and_what_is_said_before_them_are_read(name) -> None:
    parsed = read(name, f"Let me see.\n{WRITTEN[name]}\n{WRITTEN[name]}")
    assert parsed.message.content == "Let me see." and [call.id for call in parsed.message.calls] == ["a", "b"]


def test_the_calls_of_deepseek_come_in_two_frames() -> None:
    newer = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add_all<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    assert [call.name for call in read("deepseek", f"{newer}{newer}<｜tool▁calls▁end｜>").message.calls] == ["add_all", "add_all"]


def test_the_channels_of_gpt_oss_are_told_apart() -> None:
    text = "<|channel|>analysis<|message|>Two numbers.<|end|><|start|>assistant" + WRITTEN["gpt-oss"]
    parsed = read("gpt-oss", text)
    assert parsed.message.reasoning == "Two numbers." and len(parsed.message.calls) == 1 and parsed.message.content == ""
    said = read("gpt-oss", "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is 7.").message
    assert (said.reasoning, said.content) == ("Easy.", "It is 7.")
    assert read("gpt-oss", "no channel at all").message.content == "no channel at all"


@pytest.mark.parametrize(("template", "name"), [
    ("... <tool_call> {{ x }} </tool_call>", "hermes"), ("<tool_call> <function=", "qwen-xml"), ("<tool_call> <arg_key>", "glm"),
    ("[TOOL_CALLS]", "mistral"), ("[TOOL_CALLS] [ARGS]", "mistral-args"), ("role ipython", "llama3"),
    ("<｜tool▁call▁begin｜>", "deepseek"), ("<|channel|>", "gpt-oss")])
def test_a_format_is_recognised_by_the_template(template, name) -> None:
    form = recognise(template)
    assert form is not None and form.name == name


def test_a_template_without_calls_has_no_format() -> None:
    assert recognise("{{ messages }}") is None and HERMES in FORMATS


CALL = "<｜tool▁call▁begin｜>"


@pytest.mark.parametrize(("name", "head", "piece", "tail"), [
    ("gpt-oss", "", "<|channel|>analysis<|message|>x<|end|>", ""), ("gpt-oss", "", "<|channel|>final<|message|>x<|end|>", ""),
    ("deepseek", "a", " ", ""), ("deepseek", f"{CALL}a", " ", ""), ("deepseek", f"{CALL}f<｜tool▁sep｜>{{}}", " ", "x"),
    ("deepseek", "", f"{CALL}f<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>", ""), ("llama3", "", " ", ""),
    ("mistral-args", "[TOOL_CALLS]f[ARGS]{}", " ", "x"),
    ("glm", "<tool_call>f\n<arg_key>a", " ", "b</arg_key><arg_value>1</arg_value></tool_call>"),
    ("glm", "<tool_call>f\n", "<arg_key>a</arg_key>", "</tool_call>"), ("glm", "", "<tool_call>f\n", ""),
    ("glm", "<tool_call>f\n" + "</arg_value>" * 3000, "<arg_key>a</arg_key><arg_value>", "</tool_call>")])
def test_whatever_repeats_is_read_in_linear_time(name: str, head: str, piece: str, tail: str) -> None:
    text = head + piece * ((256 << 10) // len(piece)) + tail  # a time that grows with the square would pass any deadline
    message = parser_of(name).parse(text, [SUM], call_ids=str).message
    assert message.content or message.calls or message.reasoning


@pytest.mark.parametrize(("name", "text"), [
    ("glm", "<tool_call>add_all\n<arg_key>note</arg_key></arg_value><arg_value></tool_call>"),
    ("qwen-xml", "<tool_call>\n<function=add_all>\n</parameter><parameter=note>\nx</function>\n</tool_call>")])
def test_ends_that_come_before_their_beginnings_make_no_whole_call(name: str, text: str) -> None:
    parsed = read(name, text)
    assert parsed.message.calls == () and parsed.message.content == text and "without its" in parsed.malformed
