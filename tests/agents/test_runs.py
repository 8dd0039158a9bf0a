"""Whole runs that train on episodes of several turns: trainer, engine and processes of user code are real."""

import json
from pathlib import Path

import pytest

from faults.workshop import Workshop
from offbeat.telemetry.trace import read_trace
from small_run import SmallRun

CODE = Path(__file__).parents[1] / "support" / "playing.py"


@pytest.mark.drill
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
    assert all(row["rollout/turns_mean"] == 2 for row in rows)
    assert rows[0]["rollout/model_share"] > 0 and rows[0]["rollout/episode_max_s"] >= rows[0]["rollout/episode_mean_s"] > 0
    drawn = {span.name for span in read_trace(run.folder / "trace.json") if span.track.startswith("episodes ")}
    assert {"model", "tool"} <= drawn <= {"model", "tool", "queue", "reward"}
    assert "<h2>Episodes</h2>" in (run.folder / "report.html").read_text()
    events = (run.folder / "events.jsonl").read_text()
    assert not [line for line in events.splitlines() if json.loads(line)["kind"] in ("rejected", "drawn_again", "unusable_samples")]
    for group in run.groups(1):
        for trajectory in group["trajectories"]:
            # The policy answered twice, and the words between were given.
            mask = trajectory["loss_mask"]
            assert sum(now and not before for before, now in zip([False, *mask], mask, strict=False)) == 2
