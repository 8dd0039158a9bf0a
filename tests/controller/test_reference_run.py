"""Whole runs that score each batch under a reference policy: the real command, with a controller and in both ways of SPMD mode."""

from pathlib import Path

import pytest

from offbeat.telemetry.trace import read_trace
from offbeat.trainer import shards
from small_run import SmallRun, offbeat, torchrun

REFERRING = {"algorithm__kl_loss": "k3", "algorithm__kl_coefficient": "0.01", "algorithm__reference_refresh_steps": "2"}
MODES = {
    "controller": {"train__num_ranks": "2"}, "spmd": {},
    "heads": {"rollout__single_rank_load": "false", "rollout__balance_batch": "false", "train__parallel__shard": "2"}}


def test_a_run_that_reads_no_other_policy_scores_nothing(finished_run: SmallRun) -> None:
    assert all("step/score_s" not in row for row in finished_run.metrics())
    assert not [span for span in read_trace(finished_run.folder / "trace.json") if span.name == "score"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.whole_run
def test_a_run_scores_each_batch_before_it_trains_on_it(mode: str, tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    arguments = run.arguments(**REFERRING, **MODES[mode], checkpoint__every_steps="1")
    done = offbeat("train", *arguments) if mode == "controller" else torchrun("train", *arguments, world=2)
    assert done.returncode == 0, done.stderr
    assert [row["global_step"] for row in run.metrics()] == [1, 2]
    assert all(0 < row["step/score_s"] < row["step/total_s"] and row["step/train_s"] > 0 for row in run.metrics())
    spans = read_trace(run.folder / "trace.json")
    own = [span.name for span in spans if span.track == "controller" and span.name in ("advantage", "score", "train")]
    assert own == ["advantage", "score", "train"] * 2
    assert [span.name for span in spans if span.track == "rank 0"] == ["score", "train_step"] * 2
    saved = [shards.holds(run.folder / "checkpoints" / f"step-{step:08d}" / "ranks", "reference") for step in (1, 2)]
    assert saved == [False, True], "a checkpoint has the reference if it was refreshed"
