"""What the model will see of the data."""

import json
from pathlib import Path

import pytest

from offbeat.config.root import TRAINING_KINDS
from offbeat.controller.preview import preview
from small_run import small_config

CHAT = [
    {"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}, {"role": "user", "content": "+4="},
    {"role": "assistant", "content": "7"}]


@pytest.fixture
def config(tmp_path: Path, model_dir: str):
    def make(records: list[dict], **settings: str):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return small_config(
            tmp_path, model_dir, data__task="", data__path=str(tmp_path / "rows.jsonl"), data__heldout_size="0", **settings)

    return make


def test_a_prompt_is_shown_as_it_is_asked_with_what_rewards_see(config, tmp_path: Path) -> None:
    found = preview(config([{"messages": CHAT, "level": 2}, {"prompt": "31>", "answer": "13"}]), TRAINING_KINDS["train"], count=1)
    [row] = found.rows
    assert row.where == f"'{tmp_path / 'rows.jsonl'}', line 1"
    assert (row.answer, row.columns) == ("7", ("level",))
    [text] = row.texts
    assert text.pieces == (("user: 1+2=\nassistant: 3<eos>user: +4=\nassistant: ", False),)
    assert (found.num_rows, found.lengths, found.unusable, found.refused) == (2, (text.num_tokens, 3), (), ())


@pytest.mark.parametrize(("turns", "trained"), [("all", ["3<eos>", "7<eos>"]), ("last", ["7<eos>"])])
def test_a_sequence_is_shown_with_what_is_trained_on(config, turns: str, trained: list[str]) -> None:
    found = preview(config([{"messages": CHAT}], sft__assistant_turns=turns), TRAINING_KINDS["sft"], count=3)
    [text] = found.rows[0].texts
    assert [piece for piece, is_trained in text.pieces if is_trained] == trained
    assert "".join(piece for piece, _ in text.pieces) == "user: 1+2=\nassistant: 3<eos>user: +4=\nassistant: 7<eos>"
    assert text.num_trained == 2 * len(trained)


def test_both_answers_of_a_preference_are_shown(config) -> None:
    found = preview(config([{"prompt": "1+2=", "chosen": "3", "rejected": "4"}]), TRAINING_KINDS["dpo"], count=3)
    assert [(text.title, text.pieces) for text in found.rows[0].texts] == [
        ("chosen", (("1+2=", False), ("3<eos>", True))), ("rejected", (("1+2=", False), ("4<eos>", True)))]


def test_rows_that_cannot_be_used_are_told_and_not_raised(config) -> None:
    records = [{"prompt": "1>"}, {"prompt": "1" * 70, "answer": "1"}, {"prompt": "31>", "answer": "13"}]
    found = preview(config(records, rollout__reward="exact_match"), TRAINING_KINDS["train"], count=3)
    assert [row.answer for row in found.rows] == ["13"]
    assert (len(found.unusable), found.allowed) == (1, 0)
    assert "line 1, has no field 'answer'" in found.unusable[0]
    assert [reason.partition(", allowed")[0].rpartition("line ")[2] for reason in found.refused] == ["2 has 70 tokens"]
