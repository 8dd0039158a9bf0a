"""Rows as supervised sequences: what is too long, what is dropped, and what is refused by its name."""

import json
from pathlib import Path

import pytest

from chats import CHAT, FORGETS_THOUGHTS, TEXT_ALPHABET, words
from offbeat.algorithms.experience import sft_batch
from offbeat.config.data import DataConfig
from offbeat.config.train import SftConfig
from offbeat.data.dataset import ListDataset, open_datasets
from offbeat.data.packing import plan_microbatches
from offbeat.data.prompt import render
from offbeat.data.row import Row
from offbeat.data.stream import PromptStream
from offbeat.data.supervised import Supervision
from offbeat.data.tokenizer import Tokenizer, character_tokenizer
from offbeat.errors import DataError, ModelError

TOKENIZER = character_tokenizer()


def supervision(
    data: DataConfig | None = None, *, tokenizer: Tokenizer = TOKENIZER, context: int = 64, max_row_tokens: int = 64, **sft: str,
) -> Supervision:
    return Supervision(tokenizer, data or DataConfig(), SftConfig(**sft), context, max_row_tokens)


def rows(*lengths: int) -> ListDataset:
    """Rows whose sequences have so many tokens."""
    return ListDataset(tuple(Row("1>", "2" * (length - 3)) for length in lengths))


def test_a_plain_row_is_its_prompt_its_answer_and_the_end_token() -> None:
    [(tokens, mask)] = supervision().sequences(Row("31>", "13"), name="row 0")
    assert TOKENIZER.decode(tokens, skip_special_tokens=False) == "31>13<eos>"
    assert mask.tolist() == [False] * 3 + [True] * 3


def test_a_chat_of_a_file_is_trained_on_all_turns_or_the_last_and_sampled_up_to_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + json.dumps({"messages": CHAT, "answer": "12"}) + "\n")
    tokenizer, config = character_tokenizer(TEXT_ALPHABET), DataConfig(path=str(path), format="messages", heldout_size=0)
    dataset, _ = open_datasets(config, seed=0)
    texts = []
    for turns in ("all", "last"):
        for index in range(2):
            reader = supervision(config, tokenizer=tokenizer, context=200, max_row_tokens=200, assistant_turns=turns)
            [(tokens, mask)] = reader.sequences(dataset.row(index), name=f"row {index}")
            texts.append(tokenizer.decode(tokens[mask], skip_special_tokens=False))
    assert texts == ["3+4=7<eos>7+5=12<eos>"] * 2 + ["7+5=12<eos>"] * 2
    assert [dataset.row(index).answer for index in range(2)] == ["7+5=12", "12"]
    prompt = tokenizer.decode(render(dataset.row(0), tokenizer, config), skip_special_tokens=False)
    assert prompt == "system: add\nuser: 3+4\nassistant: 3+4=7<eos>user: and 5?\nassistant: "


def test_a_row_of_the_greatest_length_fits_a_micro_batch_and_one_more_token_is_refused_by_name() -> None:
    exact = supervision(max_row_tokens=9)
    assert exact.check(rows(10, 4)) == 0
    batch = sft_batch(exact.sequences(rows(10).row(0), name="row 0"))
    assert len(plan_microbatches(batch, num_ranks=1, max_tokens=9, share_prefix=True).microbatches[0]) == 1
    with pytest.raises(DataError, match=(
            r"row 1 has 11 tokens with its answer, allowed are 10, one more than train.max_tokens_per_microbatch; shorten it,"
            ' or set sft.too_long = "drop"')):
        exact.check(rows(10, 11))
    with pytest.raises(DataError, match="row 0 has 11 tokens with its answer, allowed are 10, the model's context"):
        supervision(context=10).check(rows(11))


def test_rows_that_are_too_long_are_dropped_whole_where_that_is_asked_for_and_counted() -> None:
    dropping = supervision(context=10, too_long="drop")
    dataset = rows(4, 11, 5, 12, 6)
    assert dropping.check(dataset) == 2
    stream = PromptStream(dataset, seed=0, shuffle=False)
    assert [len(tokens) for tokens, _ in dropping.draw(stream, 4)] == [4, 5, 6, 4]
    assert (stream.state().epoch, stream.state().position) == (1, 1)
    with pytest.raises(DataError, match="all 2 rows are longer than 10 tokens"):
        dropping.check(rows(11, 12))


def test_a_stream_that_holds_only_rows_to_drop_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.data.supervised._MOST_DROPPED", 5)
    with pytest.raises(DataError, match="5 rows in a row are longer than 10 tokens"):
        supervision(context=10, too_long="drop").draw(PromptStream(rows(11), seed=0), 1)


def test_a_short_text_is_not_measured_and_a_long_one_is() -> None:
    assert supervision(context=12).check(rows(4)) == 0
    many_bytes = Row("1>", "é" * 8)  # 18 bytes and 11 tokens
    assert supervision(context=11).check(ListDataset((many_bytes,))) == 0
    with pytest.raises(DataError, match="row 0 has 11 tokens"):
        supervision(context=10).check(ListDataset((many_bytes,)))


def test_an_endless_task_is_checked_by_its_first_rows() -> None:
    dataset, _ = open_datasets(DataConfig(task="sort_digits", heldout_size=4), seed=0)
    assert supervision().check(dataset) == 0
    with pytest.raises(DataError, match="row 0 has 18 tokens"):
        supervision(context=17).check(dataset)


@pytest.mark.parametrize(("row", "error", "sentence"), [
    (Row("", "7"), DataError, "the prompt of row 1 has no tokens"),
    (Row("1>", ""), DataError, "the answer of row 1 has no tokens; there is nothing to imitate"),
    (Row(({"role": "user", "content": "1"},), " "), DataError, "row 1 cannot be imitated: message 1 of the chat, the assistant's, is"),
    (Row(({"role": "judge", "content": "1"},), "2"), ModelError, "row 1 cannot be imitated: .* roles judge: what role"),
])
def test_a_row_that_cannot_be_imitated_is_named(row: Row, error: type, sentence: str) -> None:
    strict = character_tokenizer(chat_template=(
        "{% for m in messages %}{% if m['role'] not in ('user', 'assistant') %}{{ raise_exception('what role') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"))
    with pytest.raises(error, match=sentence):
        supervision(tokenizer=strict).check(ListDataset((Row("1>", "2"), row)))


def test_a_row_of_two_sequences_counts_once_in_a_batch() -> None:
    drawing = supervision(tokenizer=words(FORGETS_THOUGHTS), context=500, max_row_tokens=500)
    row = Row(tuple(CHAT[:-1]), CHAT[-1]["content"])
    drawn = drawing.draw(PromptStream(ListDataset((row,)), seed=0), 3)
    assert len(drawn) == 6
    assert sft_batch(drawn).num_targets == sum(int(mask.sum()) for _, mask in drawn)
