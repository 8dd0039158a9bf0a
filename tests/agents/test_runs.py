"""Whole runs that train on episodes of several turns: trainer, engine and processes of user code are real."""

import json
from pathlib import Path

import pytest

from faults.workshop import Workshop
from small_run import SmallRun

CODE = Path(__file__).parents[1] / "support" / "playing.py"


@pytest.mark.parametrize(("workflow", "agent"), [("gym", {"environment": f"{CODE}:Digits"}), ("agent", {"program": f"{CODE}:digits"})])
def test_a_run_trains_and_evaluates_episodes_of_two_turns(
    workflow: str, agent: dict[str, str], shop: Workshop, model_dir: str, tmp_path: Path,
) -> None:
    run = SmallRun(tmp_path, model_dir)
    done = shop.train(
        run, rollout__workflow=workflow, rollout__group_size="3", train__num_ranks="2", evaluate__every_steps="1",
        **{f"agent__{name}": value for name, value in agent.items()})
    assert done.code == 0, done.error
    rows = run.metrics()
    assert [row["global_step"] for row in rows] == [1, 2]
    events = (run.folder / "events.jsonl").read_text()
    assert not [line for line in events.splitlines() if json.loads(line)["kind"] in ("rejected", "drawn_again", "unusable_samples")]
    for group in run.groups(1):
        for trajectory in group["trajectories"]:
            # The policy answered twice, and the words between were given.
            mask = trajectory["loss_mask"]
            assert sum(now and not before for before, now in zip([False, *mask], mask, strict=False)) == 2
