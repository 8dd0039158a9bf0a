"""One step of a run, as the live page steps through a recorded run."""

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.dashboard.run_files import read_run
from offbeat.dashboard.steps import step_facts
from offbeat.errors import DataError
from rollout_samples import group, trajectory, write_rollouts


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    sample = trajectory("Q ", "yes", 1.0)
    sample["versions"][-1] = 4
    write_rollouts(tmp_path, 1, [group("Q ", sample, ("no", 0.0), index=number) for number in range(3)])
    rows = [{"global_step": 0, "eval/accuracy": 0.5}, {"global_step": 1, "reward/mean": 0.5},
            {"global_step": 2, "reward/mean": 0.75, "time_s": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def facts(run_dir: Path, step: int | None = None, *, first: int = 0, most: int = 2) -> dict[str, Any]:
    return step_facts(read_run(run_dir), run_dir, step=step, first=first, most=most)


def test_a_step_has_its_metrics_beside_those_before_and_its_groups_with_the_version_of_each_token(run_dir: Path) -> None:
    found = facts(run_dir, 1)
    assert (found["steps"], found["step"], found["num_groups"], found["kept"]) == ([0, 1, 2], 1, 3, True)
    assert found["metrics"] == [{"name": "reward/mean", "value": 0.5, "before": None}]
    [first, _] = found["groups"]
    assert [sample["address"] for sample in first["samples"]] == ["1.0.0", "1.0.1"] and first["admitted_version"] == 2
    assert (first["samples"][0]["pieces"], first["samples"][0]["versions"]) == (["y", "e", "s"], [3, 3, 4])
    [rest] = facts(run_dir, 1, first=2)["groups"]
    assert rest["prompt_id"] == "0:2" and rest["samples"][0]["address"] == "1.2.0"


def test_the_newest_step_is_shown_where_none_is_named_and_one_that_is_not_there_is_refused(run_dir: Path) -> None:
    found = facts(run_dir)
    assert (found["step"], found["kept"], found["groups"]) == (2, False, [])
    assert found["metrics"] == [{"name": "reward/mean", "value": 0.75, "before": 0.5}]
    with pytest.raises(DataError, match="the run has no step 7; it has 3 from 0 to 2"):
        facts(run_dir, 7)


def test_a_run_before_its_first_step_has_none(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert facts(tmp_path)["steps"] == []
