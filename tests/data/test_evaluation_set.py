"""Which rows an evaluation set has."""

import json
from pathlib import Path

import pytest

from offbeat.config.data import DataConfig
from offbeat.data.dataset import open_datasets
from offbeat.data.evaluation_set import open_set
from offbeat.errors import DataError


def prompts(config: DataConfig, of_run: DataConfig, *, most: int = 100) -> list[str]:
    heldout = open_datasets(of_run, seed=3)[1]
    rows = open_set(config, of_run=of_run, heldout=heldout, most=most, seed=3)
    return [str(rows.row(index).prompt) for index in range(rows.num_rows or 0)]


def written(path: Path, count: int) -> str:
    path.write_text("".join(json.dumps({"prompt": f"{path.stem} {i}", "answer": "a", "other": f"other {i}"}) + "\n" for i in range(count)))
    return str(path)


def test_the_rows_that_the_run_has_are_its_own_held_out_ones(tmp_path: Path) -> None:
    run = DataConfig(path=written(tmp_path / "run.jsonl", 10), heldout_size=3)
    assert prompts(run.model_copy(update={"system_prompt": "Think."}), run) == ["run 7", "run 8", "run 9"]
    assert prompts(run.model_copy(update={"prompt_field": "other"}), run, most=2) == ["other 7", "other 8"]


def test_of_another_file_all_rows_may_be_asked(tmp_path: Path) -> None:
    run = DataConfig(task="sort_digits", heldout_size=4)
    config = run.model_copy(update={"task": "", "path": written(tmp_path / "own.jsonl", 5)})
    assert prompts(config, run) == [f"own {i}" for i in range(5)]
    assert prompts(config, run, most=2) == ["own 0", "own 1"]


def test_rows_of_another_task_are_drawn_as_held_out_ones_are() -> None:
    run = DataConfig(task="sort_digits", task_size=3, heldout_size=4)
    longer = run.model_copy(update={"task_size": 6})
    held_out = longer.model_copy(update={"heldout_size": 7})
    assert prompts(longer, run, most=7) == prompts(held_out, held_out)
    assert len(set(prompts(longer, run, most=7))) == 7


def test_rows_to_train_on_are_no_evaluation_set() -> None:
    run = DataConfig(task="sort_digits", heldout_size=0)
    with pytest.raises(DataError, match=r"data.heldout_size is 0, and these are the rows to train on, .*; give data.path, data.split"):
        open_set(run, of_run=run, heldout=open_datasets(run, seed=0)[1], most=5, seed=0)
