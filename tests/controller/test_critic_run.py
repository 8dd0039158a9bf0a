"""Whole runs with a critic: the real command, with a controller, which resumes, and in SPMD mode with several heads."""

from pathlib import Path

import pytest

from small_run import SmallRun, offbeat, torchrun

PPO = {"algorithm__preset": "ppo", "rollout__group_size": "1", "critic__optimizer__lr": "1e-3", "checkpoint__every_steps": "1"}


@pytest.mark.whole_run
def test_a_critic_is_warmed_up_saved_and_resumed_beside_an_adapter(tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    settings = PPO | {"critic__warmup_steps": "1", "critic__normalise": "true", "algorithm__num_minibatches": "2", "model__lora__rank": "2"}
    first = offbeat("train", *run.arguments(**settings, run__total_steps="2"))
    assert first.returncode == 0, first.stderr
    assert "small · ppo" in first.stdout
    warm_up, step = run.metrics()
    assert "train/loss" not in warm_up and warm_up["train/tokens"] > 0
    assert all(row["critic/loss"] >= 0 and row["step/score_s"] > 0 and "critic/explained_variance" in row for row in (warm_up, step))
    assert "train/loss" in step and "critic/tokens" not in step
    second = offbeat("train", *run.arguments(**settings, run__total_steps="3"))
    assert second.returncode == 0, second.stderr
    assert "resumed after step 2" in second.stdout and "starts over" not in second.stdout
    assert (run.folder / "checkpoints" / "step-00000003" / "critic" / ".metadata").is_file()


@pytest.mark.whole_run
def test_every_head_trains_the_critic_on_what_it_has_drawn(tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    settings = PPO | {"rollout__single_rank_load": "false", "rollout__balance_batch": "false", "train__parallel__shard": "2"}
    done = torchrun("train", *run.arguments(**settings), world=2)
    assert done.returncode == 0, done.stderr
    assert all(row["critic/skipped_steps"] == 0 and row["train/skipped_steps"] == 0 for row in run.metrics())
