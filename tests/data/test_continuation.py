"""Text after other text, encoded and decoded: nothing is lost or added where prompt and answer meet."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chats import words
from offbeat.config.data import DataConfig
from offbeat.data.chat import mark_answers
from offbeat.data.prompt import sft_sequence
from offbeat.data.row import Row
from offbeat.data.tokenizer import Tokenizer, character_tokenizer
from offbeat.engine.text import TextStream
from spaced_tokenizers import KINDS, spaced_tokenizer

SENTENCEPIECE = ("first", "always", "older", "unigram")
TEXT = st.text(alphabet="ae 01\n", max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@given(TEXT, TEXT)
def test_a_prompt_and_what_follows_it_are_together_their_text(kind: str, prompt: str, answer: str) -> None:
    tokenizer = spaced_tokenizer(kind)
    prompt = "a" + prompt
    whole = tokenizer.decode([*tokenizer.encode(prompt), *(said := tokenizer.encode_continuation(answer))])
    assert whole == (" " if kind == "byte level with a space" else "") + prompt + answer
    assert tokenizer.decode_continuation(said) == answer


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.sampled_from(["<|user|>", "</s>", " ", "  b", "a", "0\n", "é", "😀"]), max_size=8))
def test_a_stream_of_tokens_has_the_text_that_they_add_to_a_prompt(kind: str, texts: list[str]) -> None:
    tokenizer = spaced_tokenizer(kind)
    prompt, ids = tokenizer.encode("a 1"), [token for text in texts for token in tokenizer.encode_continuation(text)]
    added = tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(prompt)):]
    stream = TextStream(tokenizer, after=tokenizer.anchor)
    assert "".join([*map(stream.push, ids), stream.finish()]) == added == tokenizer.decode_continuation(ids)


def test_tokenizers_whose_text_does_not_depend_on_what_stands_before_are_asked_once() -> None:
    for tokenizer in (spaced_tokenizer("byte level"), character_tokenizer(), words(None)):
        assert tokenizer.anchor == () and tokenizer.encode_continuation("12 ") == tokenizer.encode("12 ")
    assert all(spaced_tokenizer(kind).anchor for kind in SENTENCEPIECE)


@pytest.mark.parametrize("kind", SENTENCEPIECE)
@pytest.mark.parametrize(("prompt", "answer"), [("2 + 2 =", "4"), ("def f(x):\n", "    return x"), ("hello ", "Paris")])
def test_plain_rows_are_spelt_as_they_are_in_the_data(kind: str, prompt: str, answer: str) -> None:
    tokenizer: Tokenizer = spaced_tokenizer(kind)
    ids, mask = sft_sequence(Row(prompt, answer), tokenizer, DataConfig(path="x", heldout_size=0))
    assert tokenizer.decode(ids.tolist()) == prompt + answer
    assert tokenizer.decode_continuation(ids[mask].tolist()) == answer and ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_an_answer_in_a_chat_is_spelt_as_it_is_in_the_data_where_it_is_encoded_by_itself(kind: str) -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content }}{{ '<|end|>' if m.role == 'assistant' else '\n' }}{% endfor %}"
    tokenizer = spaced_tokenizer(kind, template=template + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "  12"}]  # whose spaces would join that of the prompt
    [text] = mark_answers(chat, tokenizer, turns="all")
    ids, mask = text.sequence(tokenizer)
    assert ids[~mask].tolist() == tokenizer.chat(chat[:1])
    assert tokenizer.decode_continuation(ids[mask].tolist(), skip_special_tokens=False) == "  12<|end|>"
