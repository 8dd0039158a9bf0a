"""`offbeat.evaluate` measures a real model on rows in memory, by sets, and with a function of the program's own."""

from pathlib import Path

import pytest

import offbeat

SMALL = {"rollout.max_new_tokens": 3, "inference.threads": 1, "cluster.stop_timeout_s": 3}


@pytest.mark.drill
def test_a_model_is_measured_on_rows_and_on_sets(tmp_path: Path, model_dir: str) -> None:
    rows = [{"prompt": f"{i}>", "answer": str(i)} for i in range(6)]

    def reward(completion: str, row: offbeat.Row) -> float:
        return float(int(row.answer) < 2)

    settings = SMALL | {"run.dir": tmp_path}
    found = offbeat.evaluate(model_dir, (row for row in rows), reward=reward, settings=settings)
    assert list(found) == ["heldout"]
    assert (found["heldout"].accuracy, found["heldout"].num_prompts) == (2 / 6, 6)
    by_set = offbeat.evaluate(model_dir, {"low": rows[:2], "high": rows[2:]}, reward=reward, settings=settings, num_prompts=3)
    assert {name: (each.accuracy, each.num_prompts) for name, each in by_set.items()} == {"low": (1.0, 2), "high": (0.0, 3)}
    assert not (tmp_path / "run").exists()
