"""Which tokens of a chat are trained on, under templates of several kinds."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import ByteLevel

from chats import CHAT, CHATML, FORGETS_THOUGHTS, MARKED, MARKED_WITHOUT_END, OPENING, TEXT_ALPHABET, words, words_with_tools
from offbeat.config.data import DataConfig
from offbeat.data.chat import mark_answers
from offbeat.data.prompt import render, sft_sequence
from offbeat.data.row import Row
from offbeat.data.tokenizer import Tokenizer, character_tokenizer, load_tokenizer
from offbeat.errors import DataError, ModelError


def trained(messages: list[dict[str, Any]], tokenizer: Tokenizer, turns: str = "all", tools: Any = ()) -> list[tuple[str, list[str]]]:
    """The text of each sequence, and the runs in it that are trained on."""
    found = []
    for part in mark_answers(messages, tokenizer, turns=turns, tools=tools):
        tokens, mask = part.sequence(tokenizer)
        assert (tokens.dtype, mask.dtype, bool(mask[-1])) == (np.int32, np.bool_, True)
        edges = [0, *(np.flatnonzero(np.diff(mask)) + 1), len(mask)]
        runs = [tokenizer.decode(tokens[low:high], skip_special_tokens=False) for low, high in pairwise(edges) if mask[low]]
        found.append((tokenizer.decode(tokens, skip_special_tokens=False), runs))
    return found


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_WITHOUT_END])
def test_what_the_assistant_says_is_trained_on_with_the_end_of_its_turn_and_nothing_else(template: str) -> None:
    tokenizer = words(template)
    [(text, runs)] = trained(CHAT, tokenizer)
    assert runs == ["3+4=7<|im_end|>", "7+5=12<|im_end|>"]
    assert text + "\n" == tokenizer.chat_text(CHAT, to_answer=False)
    assert trained(CHAT, tokenizer, "last") == [(text, ["7+5=12<|im_end|>"])]


def test_the_mask_is_that_of_transformers_where_the_template_marks_answers() -> None:
    tokenizer = words(MARKED)
    [part] = mark_answers(CHAT, tokenizer, turns="all")
    tokens, mask = part.sequence(tokenizer)
    theirs = tokenizer.hf.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    assert theirs["input_ids"][: len(tokens)] == tokens.tolist()
    assert [bool(one) for one in theirs["assistant_masks"]] == [*mask.tolist(), False]


def test_a_single_answer_is_the_prompt_as_it_is_sampled_and_then_the_answer() -> None:
    row, config = Row("3+4", "7"), DataConfig(chat_template=True)
    for tokenizer in (character_tokenizer(), words(CHATML), words(MARKED)):
        [part] = mark_answers([{"role": "user", "content": "3+4"}, {"role": "assistant", "content": "7"}], tokenizer, turns="all")
        tokens, mask = part.sequence(tokenizer)
        plain, plain_mask = sft_sequence(row, tokenizer, config)
        assert tokens[~mask].tolist() == render(row, tokenizer, config)
        assert (tokens.tolist(), mask.tolist()) == (plain.tolist(), plain_mask.tolist())


def test_a_call_of_a_tool_is_trained_on_up_to_the_end_of_its_turn() -> None:
    tokenizer = replace(words_with_tools(), template_kwargs={"thinks": True})
    chat = [
        {"role": "user", "content": "3+4"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"function": {"name": "add", "arguments": {"a": "3"}}}, {"function": {"name": "sub", "arguments": {}}}]},
        {"role": "tool", "content": "7"}, {"role": "assistant", "content": "It is 7."}]
    [part] = mark_answers(chat, tokenizer, turns="all", tools=[{"name": "add"}, {"name": "sub"}])
    tokens, mask = part.sequence(tokenizer)
    assert tokenizer.decode(tokens, skip_special_tokens=False).startswith("<|im_start|>tools\naddsub<|im_end|>\n<|im_start|>user\n3+4")
    assert tokenizer.decode(tokens[mask], skip_special_tokens=False) == (
        '<call>add{"a": "3"}</call><call>sub{}</call><|im_end|>It is 7.<|im_end|>')


def test_turns_that_the_template_rewrites_later_are_sequences_of_their_own() -> None:
    tokenizer = words(FORGETS_THOUGHTS)
    (first, first_runs), (second, second_runs) = trained(CHAT, tokenizer)
    assert (first_runs, second_runs) == (["3+4=7<|im_end|>"], ["7+5=12<|im_end|>"])
    assert first == tokenizer.chat_text(CHAT[:2]) + "3+4=7<|im_end|>"
    assert second == tokenizer.chat_text(CHAT[:4]) + "7+5=12<|im_end|>" and "\n7<|im_end|>" in second
    assert trained(CHAT, tokenizer, "last") == [(second, second_runs)]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_no_token_holds_some_of_the_prompt_and_some_of_the_answer(template: str) -> None:
    tokenizer = words(template, ("Ċ", "Ċ"), ("Ġ", "7"))
    messages = [{"role": "user", "content": " 7\n\n"}, {"role": "assistant", "content": "\n 7"}]
    [part] = mark_answers(messages, tokenizer, turns="all")
    tokens, mask = part.sequence(tokenizer)
    assert tokens[~mask].tolist() == tokenizer.chat(messages[:1]), "the prompt is as a model sees it that is to answer"
    assert tokens[mask].tolist() == tokenizer.encode("\n 7<|im_end|>")
    assert len(tokenizer.encode("\n\n")) == 1, "the pair would be one token"


def test_white_space_that_offsets_leave_out_belongs_to_the_token_behind_it() -> None:
    tokenizer = words("{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}{% if add_generation_prompt %}assistant: "
                      "{% endif %}", ("Ġ", "7"))
    tokenizer.hf.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    [part] = mark_answers([{"role": "user", "content": "x"}, {"role": "assistant", "content": "7"}], tokenizer, turns="all")
    tokens, mask = part.sequence(tokenizer)
    assert tokenizer.decode(tokens[mask]) == "7" and tokenizer.decode(tokens[~mask]).endswith("assistant: ")


def test_a_template_without_an_end_of_turn_gets_the_end_token_once() -> None:
    tokenizer = words("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}"
                      "assistant: {% endif %}")
    assert trained(CHAT, tokenizer)[0][1] == ["3+4=7\n", "7+5=12\n<|im_end|>"]


def test_only_the_first_of_several_tokens_at_the_end_is_trained_on_because_generation_stops_there() -> None:
    [(_, runs)] = trained(CHAT[1:3], words(CHATML.replace("'<|im_end|>' + '\n'", "'<|im_end|>\n<|im_start|>'")))
    assert runs == ["3+4=7<|im_end|>"]


def test_a_message_that_itself_ends_with_a_special_token_still_gets_the_end_of_its_turn() -> None:
    for content in ("call<|im_start|>", "end"):
        [(_, runs)] = trained([CHAT[1], {"role": "assistant", "content": content}], words(CHATML))
        assert runs == [f"{content}<|im_end|>"]


def test_an_end_of_turn_is_found_behind_a_message_that_the_template_changes() -> None:
    tokenizer = words(CHATML.replace("message['content']", "message['content'].upper()"))
    assert trained([CHAT[1], {"role": "assistant", "content": "seven"}], tokenizer)[0][1] == ["SEVEN<|im_end|>"]


def test_an_end_of_turn_that_the_tokenizer_does_not_call_special_is_one() -> None:
    tokenizer = words(CHATML.replace("<|im_end|>", "<turn|>"))
    tokenizer.hf.add_tokens(["<turn|>"])
    assert not tokenizer.hf.added_tokens_decoder[tokenizer.hf.convert_tokens_to_ids("<turn|>")].special
    assert trained(CHAT[1:3], tokenizer)[0][1] == ["3+4=7<turn|>"]


def test_what_the_assistant_says_first_of_all_answers_nothing() -> None:
    hello = {"role": "assistant", "content": "hi!"}
    assert trained([hello, *CHAT[1:3]], words(CHATML))[0][1] == ["3+4=7<|im_end|>"]
    for messages in ([hello], CHAT[:2]):
        with pytest.raises(DataError, match="has no message of the assistant that answers another"):
            mark_answers(messages, words(CHATML), turns="all")


def test_an_answer_that_leaves_nothing_to_imitate_is_named() -> None:
    for content in ("", " \n"):
        with pytest.raises(DataError, match="message 1 of the chat, the assistant's, is empty"):
            mark_answers([CHAT[1], {"role": "assistant", "content": content}], words(CHATML), turns="all")
    only_users = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="message 2 of the chat, the assistant's, does not show in what the chat template"):
        mark_answers(CHAT[:3], words(only_users), turns="all")


def test_templates_that_refuse_or_rewrite_are_told_in_a_sentence() -> None:
    with pytest.raises(ModelError, match="refuses messages with roles system, user: no chats"):
        mark_answers(CHAT[:3], words("{{ raise_exception('no chats') }}"), turns="all")
    other = CHATML.replace("'<|im_start|>assistant", "'<|im_start|>answer")
    with pytest.raises(DataError, match=r"writes what precedes message 2 differently once that message is there.*set data.chat_template"):
        mark_answers(CHAT[:3], words(other), turns="all")
    with pytest.raises(ModelError, match="has no chat template"):
        mark_answers(CHAT, words(None), turns="all")


def test_the_character_tokenizer_trains_every_turn_with_its_end_token() -> None:
    assert trained(CHAT, character_tokenizer(TEXT_ALPHABET))[0][1] == ["3+4=7<eos>", "7+5=12<eos>"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


THINKS = OPENING + (
    "{% if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
FORGETS = OPENING + (
    "{{ message.content.split('</think>')[-1].lstrip() }}{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + opening }}{% endif %}")
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(("thoughts", "said"), [("2 + 2 = 4", "4"), ("is it 4?", "4"), ("assistant", "assistant"), ("a\n</think>b", "a")])
def test_thoughts_that_hold_the_answer_are_not_taken_for_it(thoughts: str, said: str) -> None:
    chat = [user("assistant?"), assistant(said, reasoning_content=thoughts)]
    assert trained(chat, words(THINKS))[0][1] == [f"<think>\n{thoughts}\n</think>\n\n{said}<|im_end|>"]


def test_a_channel_named_like_the_answer_is_not_taken_for_it() -> None:
    tokenizer = words(CHATML.replace("message['content'] +", "'<|channel|>final<|message|>' + message['content'] +"))
    tokenizer.hf.add_tokens(["<|channel|>", "<|message|>"])
    assert trained([user("final"), assistant("final")], tokenizer)[0][1] == ["<|channel|>final<|message|>final<|im_end|>"]


@pytest.mark.parametrize(("opening", "message", "right"), [
    ("<think>\n", assistant("4", reasoning_content="two and two"), "two and two\n</think>\n\n4<|im_end|>"),
    ("<think>\n", assistant("<think>\ntwo and two\n</think>\n\n4"), "two and two\n</think>\n\n4<|im_end|>"),
    ("<think>\n", assistant("two and two\n</think>\n\n4"), "two and two\n</think>\n\n4<|im_end|>"),
    ("<think>\n", assistant("4"), "\n</think>\n\n4<|im_end|>"),
    ("<think>", assistant("4", reasoning_content="two and two"), "\ntwo and two\n</think>\n\n4<|im_end|>"),
    ("<think>\n\n</think>\n\n", assistant("4"), "4<|im_end|>"),
    ("", assistant("4", reasoning_content="two and two"), "<think>\ntwo and two\n</think>\n\n4<|im_end|>"),
])
def test_an_answer_continues_the_thought_that_its_prompt_opens(opening: str, message: dict[str, Any], right: str) -> None:
    tokenizer = replace(words(FORGETS), template_kwargs={"opening": opening})
    chat = [user("2 + 2?"), message, user("And 3?"), message]
    parts = mark_answers(chat, tokenizer, turns="all")
    for part, asked in zip(parts, (chat[:1], chat[:3]), strict=True):
        tokens, mask = part.sequence(tokenizer)
        assert tokens[~mask].tolist() == tokenizer.chat(asked)
        assert tokenizer.decode(tokens[mask], skip_special_tokens=False) == right


def test_an_empty_thought_is_closed_as_the_template_closes_it() -> None:
    shows = THINKS.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
    assert trained([user("2 + 2?"), assistant("4")], words(shows))[0][1] == ["\n</think>\n\n4<|im_end|>"]


def test_calls_that_a_template_writes_before_the_thought_follow_the_thought_that_the_prompt_opens() -> None:
    calls_first = OPENING + (
        "{% for c in message.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
        "{% if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}{% endif %}"
        "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}")
    chat = [user("Weather?"), assistant("Let me look.", tool_calls=[CALL], reasoning_content="Rome is asked")]
    call = '<tool_call>weather{"city": "Rome"}</tool_call>'
    assert trained(chat, words(calls_first))[0][1] == [f"Rome is asked\n</think>\n\n{call}Let me look.<|im_end|>"]


def test_reasoning_that_the_prompt_rules_out_is_refused() -> None:
    tokenizer = replace(words(FORGETS), template_kwargs={"opening": "<think>\n\n</think>\n\n"})
    with pytest.raises(DataError, match="message 1 of the chat, the assistant's, has reasoning, .* asks for an answer without"):
        mark_answers([user("2 + 2?"), assistant("4", reasoning_content="two and two")], tokenizer, turns="all")


def test_tools_and_calls_that_the_template_does_not_write_are_trained_on_in_words() -> None:
    result = {"role": "tool", "content": "sunny", "tool_call_id": "1"}
    chat = [user("Weather?"), assistant("", tool_calls=[CALL]), result, assistant("Sunny.")]
    [(text, runs)] = trained(chat, words(CHATML), tools=[TOOL])
    assert runs == ['<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>', "Sunny.<|im_end|>"]
    assert '"description": "Tells it."' in text and "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>" in text


@pytest.mark.parametrize("arguments", ['{"city":"Rome"}', {"city": "Rome"}])
def test_arguments_are_text_where_the_template_joins_text(arguments: Any) -> None:
    joins = CHATML.replace("message['content'] +", (
        "message['content'] }}{% for c in message.tool_calls or [] %}"
        "{{ '<call>' + c.function.name + ' ' + c.function.arguments + '</call>' }}{% endfor %}{{"))
    call = {"function": {"name": "weather", "arguments": arguments}}
    right = arguments if isinstance(arguments, str) else '{"city": "Rome"}'
    assert trained([user("?"), assistant("", tool_calls=[call])], words(joins))[0][1] == [f"<call>weather {right}</call><|im_end|>"]


def test_arguments_that_a_template_prints_as_python_are_given_as_text() -> None:
    prints = CHATML.replace("message['content'] +", "message['content'] }}{% for c in message.tool_calls or [] %}{{ '<call>' }}"
                            "{{ c.function.name }} {{ c.function.arguments }}{{ '</call>' }}{% endfor %}{{")
    [(_, runs)] = trained([user("?"), assistant("", tool_calls=[CALL])], words(prints))
    assert runs == ['<call>weather {"city": "Rome"}</call><|im_end|>']


def test_text_is_given_in_parts_to_a_template_that_writes_parts_alone() -> None:
    parts = CHATML.replace("message['content'] +", "'' }}{% for p in message.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
                           "{% endfor %}{{")
    assert trained(CHAT, words(parts)) == trained(CHAT, words(CHATML))


def test_a_system_message_becomes_part_of_the_users_first_where_the_template_writes_none() -> None:
    [(text, runs)] = trained(CHAT, words("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML))
    assert text.startswith("<|im_start|>user\nadd\n\n3+4<|im_end|>") and runs == ["3+4=7<|im_end|>", "7+5=12<|im_end|>"]


def test_the_template_that_tools_choose_is_the_one_that_is_read() -> None:
    tools = "{{ '<|im_start|>system\n' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}" + CHATML.replace("message['content'] +", (
        "message['content'] + (message.tool_calls | tojson if message.tool_calls else '') +"))
    tokenizer = words(MARKED)
    tokenizer.hf.chat_template = {"default": MARKED, "tool_use": tools}
    [(text, runs)] = trained(CHAT[1:3], tokenizer, tools=[TOOL])
    assert runs == ["3+4=7<|im_end|>"] and '"Tells it."' in text
    assert trained(CHAT[1:3], tokenizer)[0] == trained(CHAT[1:3], words(MARKED))[0]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_what_a_template_writes_at_the_end_of_a_chat_is_no_part_of_an_answer(template: str) -> None:
    tokenizer = words(template + "{% if not add_generation_prompt %}{{ '<|endoftext|>' }}{% endif %}")
    assert trained(CHAT, tokenizer) == trained(CHAT, words(template))


def test_white_space_between_a_prompt_and_the_marks_is_written_by_the_model() -> None:
    tokenizer = words(MARKED.replace("{% generation %}", "{{ '\n' }}{% generation %}"))
    [part] = mark_answers(CHAT[1:3], tokenizer, turns="all")
    tokens, mask = part.sequence(tokenizer)
    assert tokens[~mask].tolist() == tokenizer.chat(CHAT[1:2])
    assert tokenizer.decode(tokens[mask], skip_special_tokens=False) == "\n3+4=7<|im_end|>"


def test_a_template_that_counts_messages_gives_each_turn_its_own_sequence() -> None:
    tokenizer = words("{{ messages | length }}" + CHATML)
    (first, first_runs), (second, second_runs) = trained(CHAT, tokenizer)
    assert (first_runs, second_runs) == (["3+4=7<|im_end|>"], ["7+5=12<|im_end|>"])
    assert first == tokenizer.chat_text(CHAT[:2]) + first_runs[0] and second == tokenizer.chat_text(CHAT[:4]) + second_runs[0]


def test_what_is_asked_and_not_written_is_refused() -> None:
    nameless = CHATML.replace("message['content'] +", "message['content'][:5] +")
    with pytest.raises(DataError, match="does not write the text of a message with role 'user' of the chat, 'What is it\\?'"):
        mark_answers([user("What is it?"), assistant("7")], words(nameless), turns="all")
    with pytest.raises(DataError, match="message 1 of the chat, the assistant's, does not show.*'a mountain' is left out or changed"):
        mark_answers([user("W?"), assistant("a mountain")], words(nameless), turns="all")


SMOLLM2 = Path(__file__).parents[2] / ".models" / "smollm2-135m-instruct"


@pytest.mark.skipif(not SMOLLM2.exists(), reason="the real model is not there")
def test_the_real_tokenizer_of_smollm2_gives_the_turns_of_the_assistant() -> None:
    tokenizer = load_tokenizer(SMOLLM2)
    [(text, runs)] = trained(CHAT[1:], tokenizer)
    assert runs == ["3+4=7<|im_end|>", "7+5=12<|im_end|>"]
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    [part] = mark_answers(CHAT[1:3], tokenizer, turns="all")
    tokens, mask = part.sequence(tokenizer)
    assert tokens[~mask].tolist() == tokenizer.chat(CHAT[1:2])
