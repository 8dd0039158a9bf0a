"""A whole run over episodes of several trajectories and turns: credit by state, metrics, evaluation, and what is written."""

from pathlib import Path

import pytest

from small_run import SmallRun, offbeat

WORKFLOW = Path(__file__).parents[1] / "support" / "workflows.py"


@pytest.mark.whole_run
@pytest.mark.parametrize("preset", ["gigpo", "ppo"])
def test_a_run_trains_on_episodes_of_several_trajectories(preset: str, tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    done = offbeat("train", *run.arguments(
        rollout__workflow=f"{WORKFLOW}:two_pieces", rollout__group_size="4", algorithm__preset=preset, evaluate__samples_per_prompt="2",
        evaluate__temperature="1.0", evaluate__pass_at="[1, 2]"))
    assert done.returncode == 0, done.stderr
    for row in run.metrics()[-2:]:
        assert row["train/grad_norm"] > 0 and not row["train/skipped_steps"]
        # Three of four episodes have two trajectories and three turns; the fourth failed.
        assert (row["rollout/chains_mean"], row["rollout/turns_mean"], row["rollout/malformed_call_share"]) == (1.75, 2.25, 0.75)
    first = run.metrics()[0]
    assert first["rollout/unusable_episode_failed_share"] == first["rollout/unusable_share"] == 0.25
    assert 0 <= run.metrics()[-1]["eval/pass_at_1"] <= run.metrics()[-1]["eval/pass_at_2"] <= 1
    assert run.events("evaluation")[-1]["eval/pass_at_2"] == run.metrics()[-1]["eval/pass_at_2"]
    assert "pass@2" in done.stdout
    reasons = [reason for event in run.events("unusable_samples") for reason in event["reasons"]]
    assert set(reasons) == {"episode failed: it was the last"}
    for group in run.groups(1):
        assert [t["episode"] for t in group["trajectories"]] == [0, 0, 1, 1, 2, 2, 3]
        assert [turn["order"] for t in group["trajectories"][:2] for turn in t["turns"]] == [0, 2, 1]
