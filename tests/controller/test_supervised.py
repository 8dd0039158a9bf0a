"""Supervised warm-up before reinforcement learning, in one real run."""

import io
from itertools import pairwise
from pathlib import Path

from offbeat.controller.run import run_training
from offbeat.telemetry.console import Console
from small_run import SmallRun, small_config


def test_a_warm_up_learns_publishes_and_hands_over(tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    config = small_config(
        tmp_path, model_dir, run__warm_up="true", run__total_steps="1", sft__total_steps="12", sft__batch_size="16",
        sft__evaluate_every_steps="5", sft__optimizer__lr="1e-2", sft__optimizer__warmup_steps="0")
    result = run_training(config, Console("quiet", stream=io.StringIO()))
    assert (result.warm_up_steps, result.steps) == (12, 1)
    steps = run.events("sft_step")
    assert [event["step"] for event in steps] == list(range(1, 13))
    assert steps[-1]["train/loss"] < 0.8 * steps[0]["train/loss"]
    # Evaluated after 5, 10 and 12 supervised steps, then handed over, then trained once.
    versions = [event["version"] for event in run.events("publish")]
    assert versions == [4, 5]
    assert all(later > earlier for earlier, later in pairwise(versions))
    assert [row["global_step"] for row in run.metrics()] == [1]
