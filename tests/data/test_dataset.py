"""Opening datasets: what is trained on, what is held out, and rows that cannot be used."""

import json

import pytest

from offbeat.config.data import DataConfig
from offbeat.data.dataset import open_datasets
from offbeat.errors import DataError


def write(path, count, *, prefix=""):
    path.write_text("".join(json.dumps({"prompt": f"{prefix}{i}", "answer": str(i)}) + "\n" for i in range(count)))
    return str(path)


def prompts(dataset, count=None):
    return [dataset.row(i).prompt for i in range(dataset.num_rows if count is None else count)]


def test_held_out_rows_come_from_the_end_and_are_not_trained_on(tmp_path):
    config = DataConfig(path=write(tmp_path / "d.jsonl", 10), heldout_size=3)
    train, heldout = open_datasets(config, seed=0)
    assert prompts(train) == [str(i) for i in range(7)]
    assert prompts(heldout) == ["7", "8", "9"]
    with pytest.raises(IndexError):
        train.row(7)


def test_held_out_rows_can_come_from_a_file_or_not_at_all(tmp_path):
    path, other = write(tmp_path / "d.jsonl", 4), write(tmp_path / "h.jsonl", 5, prefix="h")
    train, heldout = open_datasets(DataConfig(path=path, heldout_path=other, heldout_size=2), seed=0)
    assert (train.num_rows, prompts(heldout)) == (4, ["h0", "h1"])
    train, heldout = open_datasets(DataConfig(path=path, heldout_path=other, heldout_size=99), seed=0)
    assert heldout.num_rows == 5
    train, heldout = open_datasets(DataConfig(path=path, heldout_size=0), seed=0)
    assert (train.num_rows, heldout.num_rows) == (4, 0)


@pytest.mark.parametrize("task", ["sort_digits", "addition"])
def test_no_generated_prompt_is_both_trained_on_and_held_out(task):
    # 100 different prompts of which 40 are held out, so that nearly half of all draws must be refused.
    train, heldout = open_datasets(DataConfig(task=task, task_size=2 if task == "sort_digits" else 1, heldout_size=40), seed=5)
    held = set(prompts(heldout))
    trained = set(prompts(train, 1000))
    assert len(held) == 40
    assert len(trained) == 60
    assert not held & trained
    assert train.num_rows is None


def test_generated_datasets_depend_on_the_seed_alone():
    config = DataConfig(task="countdown", task_size=4, heldout_size=8)
    (train, heldout), (again, held_again) = open_datasets(config, seed=1), open_datasets(config, seed=1)
    other, _ = open_datasets(config, seed=2)
    assert prompts(train, 20) == prompts(again, 20) != prompts(other, 20)
    assert prompts(heldout) == prompts(held_again)


@pytest.mark.parametrize(("size", "heldout_size"), [(1, 256), (1, 10)])
def test_a_task_too_small_to_hold_out_says_so(size, heldout_size):
    with pytest.raises(DataError, match="has too few different prompts .* raise data.task_size or lower data.heldout_size"):
        open_datasets(DataConfig(task="sort_digits", task_size=size, heldout_size=heldout_size), seed=0)


def test_rows_that_cannot_be_used_are_left_out_with_their_reasons(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b"}\n{"prompt": "c", "answer": "3"}\n{"prompt": "d", "answer": [4]}\n')
    refused = []
    train, heldout = open_datasets(DataConfig(path=str(path), max_unusable_rows=2, heldout_size=1), seed=0, refused=refused)
    assert (prompts(train), prompts(heldout)) == (["a"], ["c"])
    assert heldout.where(0) == f"{str(path)!r}, line 3"
    assert [reason.removeprefix(f"{str(path)!r}, ").partition(";")[0] for reason in refused] == [
        "line 2, has no field 'answer'", "line 4: field 'answer' must be text or a number, got list"]
    with pytest.raises(DataError, match="2 rows cannot be used, allowed are data.max_unusable_rows = 1"):
        open_datasets(DataConfig(path=str(path), max_unusable_rows=1), seed=0)
    train, _ = open_datasets(DataConfig(path=str(path), heldout_size=0), seed=0, needs_answer=False)
    assert prompts(train) == ["a", "b", "c", "d"]


def test_a_quick_look_opens_the_first_rows_alone(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n' * 5 + "no JSON\n")
    train, heldout = open_datasets(DataConfig(path=str(path), heldout_size=100), seed=0, limit=5)
    assert (train.num_rows, heldout.num_rows) == (5, 0)
    with pytest.raises(DataError, match="line 6, is not JSON"):
        open_datasets(DataConfig(path=str(path), heldout_size=100), seed=0, limit=6)


def test_settings_that_cannot_be_opened_say_what_to_change(tmp_path):
    path = write(tmp_path / "d.jsonl", 3)
    for config, sentence in [
        (DataConfig(), "data.task and data.path are both empty"),
        (DataConfig(path=path, heldout_size=3), "has 3 rows, which leaves none to train on after data.heldout_size = 3"),
        (DataConfig(path=path, heldout_split="test"), "data.heldout_split is for hub ids and folders, but"),
        (DataConfig(path=path, answer_field="label"), r"d.jsonl', line 1, has no field 'label'; it has prompt, answer"),
    ]:
        with pytest.raises(DataError, match=sentence):
            open_datasets(config, seed=0)
