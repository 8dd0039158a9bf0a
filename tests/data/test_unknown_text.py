"""Rows with text that a tokenizer does not know."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offbeat.config.data import DataConfig
from offbeat.data.dataset import open_datasets
from offbeat.data.pairs import open_pairs
from offbeat.data.row import Row
from offbeat.data.tokenizer import DEFAULT_ALPHABET, Tokenizer, character_tokenizer
from offbeat.data.unknown_text import check_preference, check_row, describe_alphabet, unwritable_answers
from offbeat.errors import DataError

TINY = character_tokenizer()
CONFIG = DataConfig(heldout_size=0)


def why(row: Row, tokenizer: Tokenizer = TINY, *, answered: bool = True, config: DataConfig = CONFIG) -> str:
    """Why a row is refused; empty if it is not."""
    check = check_row(tokenizer, config, answered=answered)
    assert check is not None
    try:
        check(row, "row 3")
    except DataError as exc:
        return str(exc)
    return ""


def over_bytes() -> Tokenizer:
    """A tokenizer that knows every text, and has an unknown token for no text, as GPT-2's has."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: i for i, token in enumerate(["<end>", *letters])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<end>"), "bytes")


def over_words() -> Tokenizer:
    words = {token: i for i, token in enumerate(("<end>", "[UNK]", "how", "are", "you", "fine"))}
    backend = Backend(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="[UNK]"), "words")


def test_the_sentence_has_the_character_the_alphabet_and_what_to_do() -> None:
    assert why(Row("1 day after sunday:", "Monday")) == (
        "row 3: 'M' in its answer is not in the alphabet of the tiny model: digits, lower-case letters, space, line break, and"
        " + - * / = ( ) > , . ? # :; use lower case, or use a pretrained model (model.path)")
    assert "'_' in its prompt is not in the alphabet" in why(Row("a_b", "b"))
    assert "; leave it out, or use a pretrained model" in why(Row("a_b", "b"))
    assert why(Row("a?\n(1+2)", "b")) == ""


def test_an_answer_counts_where_it_is_imitated_or_compared() -> None:
    assert why(Row("1>", "A"), answered=False) == ""
    assert "'W' in its answer" in why(Row("1>", "1", solution="Why not"))
    said = {"role": "assistant", "content": "1", "reasoning_content": "Hm"}
    assert "'H' in its answer" in why(Row(({"role": "user", "content": "1>"},), "1", said=said))


def test_messages_count_with_those_that_settings_add() -> None:
    chat = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "B"}, {"role": "user", "content": "c"})
    assert "'B' in its prompt" in why(Row(chat, "d"))
    assert "'Y' in its system message" in why(Row(chat, "d"), config=CONFIG.model_copy(update={"system_prompt": "You add."}))


def test_any_tokenizer_with_an_unknown_token_is_asked_and_one_over_bytes_never() -> None:
    assert why(Row("how are you", "fine"), over_words()) == ""
    assert why(Row("how is it", "fine"), over_words()) == (
        "row 3: 'is' in its prompt is unknown to the tokenizer 'words', which reads [UNK] in its place; leave it out, or use a model whose"
        " tokenizer knows it (model.path)")
    assert over_bytes().unknown_id is None and over_bytes().unknown_in("<end> Ä") == ""
    assert check_row(over_bytes(), CONFIG, answered=True) is None and check_preference(over_bytes(), CONFIG) is None
    hf = TINY.hf
    assert replace(TINY, hf=hf, alphabet="").unknown_in("ab<unk>") == "<unk>"


def test_such_rows_are_among_those_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}>", "answer": "Ab"[i % 2]}) + "\n" for i in range(4)))
    refused: list[str] = []
    config = DataConfig(path=str(path), heldout_size=0, max_unusable_rows=2)
    check = check_row(TINY, config, answered=True)
    train, _ = open_datasets(config, seed=0, refused=refused, check=check)
    assert train.num_rows == 2 and [reason.partition(" in its")[0] for reason in refused] == [
        f"'{path}', line 1: 'A'", f"'{path}', line 3: 'A'"]
    with pytest.raises(DataError, match="line 1: 'A' in its answer is not in the alphabet of the tiny model"):
        open_datasets(config.model_copy(update={"max_unusable_rows": 0}), seed=0, check=check)
    path.write_text('{"prompt": "B", "answer": "b"}\n')
    with pytest.raises(DataError, match="no rows that can be used; the first: .* line 1: 'B' in its prompt is not in the alphabet"):
        open_datasets(config, seed=0, check=check)


def test_preferences_are_asked_for_both_answers(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b", "rejected": "C"}\n')
    config = DataConfig(path=str(path), heldout_size=0)
    with pytest.raises(DataError, match="line 1: 'C' in its answers is not in the alphabet"):
        open_pairs(config, check=check_preference(TINY, config))


def test_prompts_of_a_task_are_asked_before_the_run() -> None:
    config = DataConfig(task="sort_digits", heldout_size=2)
    with pytest.raises(DataError, match="row 0: '.' in its prompt is not in the alphabet"):
        open_datasets(config, seed=0, check=check_row(character_tokenizer("0123>"), config, answered=False))
    assert open_datasets(config, seed=0, check=check_row(TINY, config, answered=True))[1].num_rows == 2


def test_answers_for_rewards_that_the_model_cannot_write_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    path = tmp_path / "days.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1>", "answer": answer}) + "\n" for answer in ("sunday", "MONday", "Friday", "")))
    config = DataConfig(path=str(path), heldout_size=0, shuffle=False)
    rows, _ = open_datasets(config, seed=0, needs_answer=False, check=check_row(TINY, config, answered=False))
    said = unwritable_answers(TINY, rows)
    assert said.startswith(
        "2 of the first 4 rows have an answer that the model can never write; a reward that compares with it is never earned."
        f" The first is '{path}', line 2: 'M' is not in the alphabet of the tiny model: digits, lower-case letters")
    assert said.endswith("; use lower case, or use a pretrained model (model.path)")
    assert unwritable_answers(over_bytes(), rows) == "" == unwritable_answers(TINY, open_datasets(
        DataConfig(task="countdown", heldout_size=2), seed=0)[0])


def test_an_alphabet_is_described_by_what_is_whole_in_it() -> None:
    assert describe_alphabet("ba") == "b a"
    assert describe_alphabet("0123456789") == "digits"
    assert describe_alphabet(DEFAULT_ALPHABET).startswith("digits, lower-case letters, space, line break, and + -")
