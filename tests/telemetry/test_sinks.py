"""The metrics file, and which other sinks there are."""

import json

import pytest

from offbeat.errors import MissingExtraError
from offbeat.telemetry.sinks import JsonLinesSink, check_installed, metrics_of


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_drops_the_rows_that_it_will_write_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path)
    for step in range(1, 6):
        sink.write({"global_step": step, "loss": float(step)})
    sink.close()
    resumed = JsonLinesSink(path)
    resumed.resume_at(4)
    resumed.write({"global_step": 4, "loss": 40.0})
    resumed.close()
    assert [(row["global_step"], row["loss"]) for row in rows(path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


def test_resuming_at_the_first_step_empties_the_file(tmp_path):
    sink = JsonLinesSink(tmp_path / "metrics.jsonl")
    sink.write({"global_step": 0})
    sink.resume_at(0)
    sink.close()
    assert rows(tmp_path / "metrics.jsonl") == []


def test_the_place_in_the_run_is_no_metric():
    assert metrics_of({"epoch": 1, "step": 2, "global_step": 2, "time_s": 3.0, "train/loss": 0.5}) == {"epoch": 1, "train/loss": 0.5}


def test_a_missing_package_is_told_with_its_extra():
    check_installed(["tensorboard", "wandb", "trackio", "mlflow"])
    with pytest.raises(MissingExtraError, match=r"has 'abacus', which is not installed; run pip install 'offbeat\[abacus\]'"):
        check_installed(["tensorboard", "abacus"])


def test_mlflow_needs_what_makes_its_local_database(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "alembic" else name)
    with pytest.raises(MissingExtraError, match=r"pip install 'offbeat\[mlflow\]'"):
        check_installed(["mlflow"])
