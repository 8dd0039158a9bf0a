"""A whole run with dynamic sampling and a curriculum, of two ranks that each draw their own rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from small_run import REWARDS, SmallRun, torchrun

SAMPLED = {
    "data__task": "", "data__heldout_size": "0", "rollout__max_head_offpolicyness": "0", "rollout__reward": f"{REWARDS}:varies_on_odd",
    "rollout__single_rank_load": "false", "rollout__balance_batch": "false", "rollout__consumer_batch_size": "4",
    "algorithm__dynamic_sampling": "true", "algorithm__max_draw_batches": "2", "curriculum__pools": "true", "curriculum__leave_at": "0.9",
    "checkpoint__every_steps": "1"}
NUM_ROWS = 24


def heads_of(run: SmallRun, step: int) -> list[dict[str, Any]]:
    complete = run.folder / "checkpoints" / f"step-{step:08d}" / "complete.json"
    return json.loads(complete.read_text(encoding="utf-8"))["heads"]


@pytest.mark.whole_run
def test_each_head_rejects_flat_groups_up_to_its_bound_and_knows_its_own_rows(tmp_path: Path, model_dir: str) -> None:
    data = tmp_path / "rows.jsonl"
    # The rows of the first rank are the even ones.
    data.write_text("".join(json.dumps({"prompt": f"{i}>", "answer": str(i)}) + "\n" for i in range(NUM_ROWS)), encoding="utf-8")
    run = SmallRun(tmp_path, model_dir)
    done = torchrun("train", *run.arguments(**SAMPLED, data__path=str(data)), world=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 groups of equal rewards were rejected for one step") == 1
    rows = run.metrics()
    assert [row["global_step"] for row in rows] == [1, 2]
    for row in rows:
        assert (row["sampling/rejected_groups"], row["sampling/kept_flat_groups"]) == (2, 2)
        assert row["reward/zero_advantage_group_share"] == 0.5
        assert row["reward/right_mean"] == row["reward/mean"] == 0.75 and row["reward/form_flat_group_share"] == 1
    why = {(event["why"], event["reason"]) for event in run.events("rejected")}
    assert why == {("equal rewards", "all rewards are equal: 1")}
    flat, varied = heads_of(run, 2)
    assert set(flat["stream"]["curriculum"]["means"].values()) == {1.0} and len(flat["stream"]["curriculum"]["left"]) == 8
    assert set(varied["stream"]["curriculum"]["means"].values()) == {0.5} and len(varied["stream"]["curriculum"]["means"]) == 4
    assert rows[-1]["curriculum/left_share"] == 8 / NUM_ROWS and rows[-1]["curriculum/normal_prompts"] == 4
