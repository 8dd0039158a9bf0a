"""Runs whose sampling leaves tokens out: engine and trainer compare the same distributions, and so does a replay of the run."""

from pathlib import Path

import pytest

from faults.workshop import Workshop
from small_run import SmallRun, offbeat

CUT = {
    "rollout__top_p": "0.7", "rollout__top_k": "20", "rollout__max_head_offpolicyness": "0"}


def test_a_run_compares_what_was_sampled(shop: Workshop, tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    done = shop.train(run, **CUT)
    assert done.code == 0 and not any("tokens out" in line for line in done.said)
    assert len(run.metrics()) == 2 and all(row["policy/logprob_gap_max"] < 1e-5 for row in run.metrics())


def test_without_the_replay_of_supports_every_ratio_is_too_small_and_the_run_says_so(
    shop: Workshop, tmp_path: Path, model_dir: str,
) -> None:
    run = SmallRun(tmp_path, model_dir)
    done = shop.train(run, **CUT, model__support_replay="off")
    assert [line.startswith("rollout.top_p = 0.7 and rollout.top_k = 20 leave") for line in done.said if "tokens out" in line] == [True]
    assert all(row["policy/logprob_gap_mean"] > 0.2 and row["policy/weight_max"] < 1 for row in run.metrics())


@pytest.mark.drill
def test_a_run_is_replayed_with_its_supports(tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    done = offbeat("train", *run.arguments(**CUT, checkpoint__journal_keep="all"))
    assert done.returncode == 0, done.stderr
    replayed = offbeat("replay", str(run.folder))
    assert replayed.returncode == 0 and "all steps are equal" in replayed.stdout, replayed.stdout + replayed.stderr
