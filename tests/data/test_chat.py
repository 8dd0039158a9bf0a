"""Which tokens of a chat are trained on, under templates of several kinds."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import ByteLevel

from chats import CHAT, CHATML, FORGETS_THOUGHTS, MARKED, MARKED_WITHOUT_END, TEXT_ALPHABET, words, words_with_tools
from offbeat.config.data import DataConfig
from offbeat.data.chat import mark_answers
from offbeat.data.prompt import render, sft_sequence
from offbeat.data.row import Row
from offbeat.data.tokenizer import Tokenizer, character_tokenizer, load_tokenizer
from offbeat.errors import DataError, ModelError


def trained(messages: list[dict[str, str]], tokenizer: Tokenizer, turns: str = "all") -> list[tuple[str, list[str]]]:
    """The text of each sequence, and the runs in it that are trained on."""
    found = []
    for part in mark_answers(messages, tokenizer, turns=turns):
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
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}, {"function": {"name": "sub"}}]},
        {"role": "tool", "content": "7"}, {"role": "assistant", "content": "It is 7."}]
    [part] = mark_answers(chat, tokenizer, turns="all", tools=[{"name": "add"}, {"name": "sub"}])
    tokens, mask = part.sequence(tokenizer)
    assert tokenizer.decode(tokens, skip_special_tokens=False).startswith("<|im_start|>tools\naddsub<|im_end|>\n<|im_start|>user\n3+4")
    assert tokenizer.decode(tokens[mask], skip_special_tokens=False) == (
        "<call>add</call><call>sub</call><|im_end|>It is 7.<|im_end|>")


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
    with pytest.raises(ModelError, match="refuses messages with roles system, user, assistant: no system"):
        mark_answers(CHAT[:3], words("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"), turns="all")
    counts = "{{ messages | length }}" + CHATML
    with pytest.raises(DataError, match=r"writes what precedes message 2 differently once that message is there.*\{% generation %\}"):
        mark_answers(CHAT[:3], words(counts), turns="all")
    with pytest.raises(ModelError, match="has no chat template"):
        mark_answers(CHAT, words(None), turns="all")


def test_the_character_tokenizer_trains_every_turn_with_its_end_token() -> None:
    assert trained(CHAT, character_tokenizer(TEXT_ALPHABET))[0][1] == ["3+4=7<eos>", "7+5=12<eos>"]


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
