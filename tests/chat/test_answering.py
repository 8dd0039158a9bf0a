"""From samples to replies: what ends a text, what is told of it, and what is a call."""

import pytest

from chats import CHATML, words
from offbeat.chat.answering import Answering, Chat, answer_of
from offbeat.chat.anthropic import Anthropic
from offbeat.chat.completions import Completions
from offbeat.chat.messages import ChatRequest, Message, Reply, Tool
from offbeat.chat.shaping import Shaping
from offbeat.inference.sampling import Sample
from support.chat_templates import QWEN, tokenizer_with

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD, USER = Tool("add", "Add.", {"type": "object", "properties": {"a": {"type": "integer"}}}), (Message("user", "hello"),)
ANSWERING = Answering.of(words(CHATML))


def sample(text: str, finish: str = "stop") -> Sample:
    ids = tuple(ANSWERING.renderer.tokenizer.encode(text))
    return Sample(ids, (-0.5,) * len(ids), (3,) * len(ids), "", finish)


def reply(text: str, *, finish: str = "stop", plain: bool = False, **asked) -> Reply:
    chat = ANSWERING.prepare_chat(ChatRequest(USER, **asked), Completions() if plain else Anthropic())
    return ANSWERING.reply(chat, sample(text, finish))


def test_the_end_of_the_turn_is_no_part_of_the_text_but_of_the_tokens() -> None:
    told = reply("hello<|im_end|>", logprobs=True, return_token_ids=True)
    assert told.message == Message("assistant", "hello") and told.finish == "stop" and told.num_tokens == len(told.token_ids) == 6
    assert told.logprobs[-1].text == "<|im_end|>" and told.versions == (3,) * 6
    assert reply("hello", logprobs=False).logprobs == ()


@pytest.mark.parametrize(("stop", "text", "stopped"), [
    (("b",), "a", "b"), (("c", "bc"), "a", "bc"), (("z",), "abc", ""), (("<|im_end|>",), "abc", "")])
def test_a_text_is_cut_at_what_stopped_it(stop: tuple[str, ...], text: str, stopped: str) -> None:
    told = reply("abc" if stop != ("<|im_end|>",) else "abc<|im_end|>", stop=stop)
    assert (told.message.content, told.stop) == (text, stopped)


@pytest.mark.parametrize(("min_tokens", "text"), [(0, "a"), (2, "a"), (3, "abca"), (6, "abcabc")])
def test_a_stop_string_among_the_least_number_of_tokens_stays_in_the_text(min_tokens: int, text: str) -> None:
    told = reply("abcabc", stop=("bc",), shaping=Shaping(min_tokens=min_tokens))
    assert told.message.content == text and told.stop == ("" if text == "abcabc" else "bc")


def test_special_tokens_among_the_stops_are_given_as_tokens() -> None:
    chat = ANSWERING.prepare_chat(ChatRequest(USER, stop=("b", "<|im_start|>")), Completions())
    assert chat.stop == chat.stops == ("b",) and chat.stop_token_ids == (ANSWERING.renderer.tokenizer.special_tokens.get("<|im_start|>"),)
    assert ANSWERING.reply(chat, sample("a<|im_start|>")).message.content == "a"


def test_a_call_is_read_where_there_are_tools_and_forced_where_it_has_to_be() -> None:
    told = reply(f"ok {CALL}<|im_end|>", tools=(ADD,))
    assert told.finish == "tool_calls" and told.message.calls[0].name == "add" and told.message.calls[0].id.startswith("call_")
    assert reply(CALL, tools=(ADD,), tool_choice="none").message.calls == () == reply(CALL).message.calls
    forced = ANSWERING.prepare_chat(ChatRequest(USER, (ADD,), tool_choice="required"), Completions())
    assert forced.opening.endswith('"add", "arguments": ')
    assert ANSWERING.renderer.tokenizer.decode(forced.prompt, skip_special_tokens=False).endswith(forced.opening)
    assert ANSWERING.reply(forced, sample('{"a": 1}}\n</tool_call>')).message.calls[0].arguments == '{"a": 1}'


def test_the_only_call_of_an_answer_ends_it() -> None:
    chat = ANSWERING.prepare_chat(ChatRequest(USER, (ADD,), stop=("x",), parallel_calls=False), Completions())
    assert chat.stops == ("x", "</tool_call>")
    told = ANSWERING.reply(chat, sample(f"{CALL} x"))
    assert len(told.message.calls) == 1 and told.stop == "" and told.finish == "tool_calls"


def test_a_call_that_was_cut_is_text_and_marked() -> None:
    told = reply(CALL[:20], tools=(ADD,), finish="length")
    assert told.message.content == CALL[:20] and told.malformed and told.finish == "length"


def test_chat_completions_without_tools_are_told_as_they_were_written() -> None:
    assert reply("<think>hm</think>ok<|im_end|>", plain=True).message == Message("assistant", "<think>hm</think>ok")
    assert reply("<think>hm</think>ok<|im_end|>").message == Message("assistant", "ok", reasoning="hm")


def test_an_answer_holds_the_prompt_if_its_tokens_are_wanted() -> None:
    told = answer_of(ChatRequest(USER, return_token_ids=True), [1, 2], [reply("a")], model="m")
    assert (told.prompt_ids, told.num_prompt_tokens, told.model) == ((1, 2), 2, "m")
    assert answer_of(ChatRequest(USER), [1, 2], [], model="m").prompt_ids == () and Chat(ChatRequest(USER), [1]).stops == ()


def asked_with(answering: Answering, **asked) -> str:
    request = ChatRequest(USER, **asked)
    chat = answering.prepare_chat(request, Completions())
    assert answering.count(request) == len(chat.prompt)
    return answering.renderer.tokenizer.decode(chat.prompt, skip_special_tokens=False).replace("<|im_end|>\n", "").partition("hello")[2]


def test_a_client_sets_the_variables_that_the_chat_template_reads() -> None:
    effort = "{%- if reasoning_effort is defined %}{{ 'effort ' + reasoning_effort + '\n' }}{%- endif %}"
    thought = "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    begun, closed = "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    both, plain = Answering.of(tokenizer_with(QWEN + effort + thought)), Answering.of(tokenizer_with(QWEN))
    for asked, expected in [
        ({}, begun), ({"thinks": True}, begun), ({"thinks": False}, closed), ({"effort": "low"}, f"{begun}effort low\n"),
        ({"effort": "none"}, f"{begun}effort none\n<think>\n\n</think>\n\n"),
        ({"thinks": True, "template_kwargs": {"enable_thinking": False, "other": [1]}}, closed),
    ]:
        assert asked_with(both, **asked) == expected
        assert asked_with(plain, **asked) == begun


def test_an_answer_is_read_by_what_its_own_prompt_has_begun() -> None:
    opened = "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking %}{{ '<think>\n' }}{%- endif %}"
    answering = Answering.of(tokenizer_with(QWEN + opened))
    ids = tuple(answering.renderer.tokenizer.encode("hm</think>7"))
    told = Sample(ids, (-0.5,) * len(ids), (3,) * len(ids), "", "length")
    for thinks, message in [(True, Message("assistant", "7", reasoning="hm")), (None, Message("assistant", "hm</think>7"))]:
        assert answering.reply(answering.prepare_chat(ChatRequest(USER, thinks=thinks), Anthropic()), told).message == message
