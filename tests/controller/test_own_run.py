"""Whole runs with an objective and a credit of the user's own, and with coefficients that adapt: the real command."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from small_run import ENVIRONMENT, SmallRun

SUPPORT = Path(__file__).parents[1] / "support"
OWN = {
    "algorithm__objective": "own_losses.py:clipped", "algorithm__credit": "own_credits.py:later_turns_less",
    "algorithm__constants": "{low = 0.8, high = 1.2, decay = 0.5}"}
ADAPTIVE = {
    "algorithm__kl_loss": "k3", "algorithm__kl_coefficient": "0.1", "algorithm__kl_target": "0.01", "algorithm__entropy_target": "9.0"}
FAILING = """
from offbeat.losses.own import TokenLosses

def fails_later(tokens, constants):
    if tokens.logprobs.detach().max() < -1.5:  # of a model that has learnt nothing, not of the tokens that a check makes up
        raise ValueError("the tokens are too rare")
    return TokenLosses(-tokens.ratio * tokens.advantages)
"""


def train(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command where the files of the user's own lie."""
    return subprocess.run(
        [sys.executable, "-m", "offbeat", "train", *arguments], capture_output=True, text=True, timeout=200, check=False, cwd=folder,
        env=os.environ | ENVIRONMENT)


@pytest.mark.whole_run
def test_a_run_trains_with_own_code_and_adaptive_coefficients_and_goes_on_exactly(tmp_path: Path, model_dir: str) -> None:
    for name in ("own_losses.py", "own_credits.py"):
        shutil.copy(SUPPORT / name, tmp_path)
    run = SmallRun(tmp_path, model_dir)
    settings = {**OWN, **ADAPTIVE, "train__optimizer__lr": "1e-2", "checkpoint__every_steps": "1"}
    done = train(tmp_path, *run.arguments(**settings))
    assert done.returncode == 0, done.stderr
    with (tmp_path / "own_losses.py").open("a") as file:
        file.write("# another version\n")
    done = train(tmp_path, *run.arguments(**settings, run__total_steps="4"))
    assert done.returncode == 0, done.stderr
    assert "continues with another algorithm.objective: the file of its code is not as it was at the checkpoint" in done.stdout
    assert "another algorithm.credit" not in done.stdout
    rows = run.metrics()
    assert [row["global_step"] for row in rows] == [1, 2, 3, 4]
    assert all(0 <= row["own/clipped"] <= 1 and row["train/grad_norm"] > 0 and not row["train/skipped_steps"] for row in rows)
    beta = 0.1
    for number, row in enumerate(rows):
        assert row["train/kl_coefficient"] == pytest.approx(beta, rel=1e-12)
        assert row["train/entropy_coefficient"] == pytest.approx(0.005 * number, rel=1e-12)  # the entropy is below 9 nats at all steps
        beta *= 1 + min(max(row["policy/kl_rollout_to_ref_k1_mean"] / 0.01 - 1, -0.2), 0.2) / 10
    assert beta != 0.1


@pytest.mark.whole_run
def test_own_code_that_fails_in_a_run_is_named_with_its_line_and_the_step(tmp_path: Path, model_dir: str) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    run = SmallRun(tmp_path, model_dir)
    done = train(tmp_path, *run.arguments(algorithm__objective="failing.py:fails_later", train__num_ranks="2"))
    assert done.returncode == 1
    where = f"{(tmp_path / 'failing.py').resolve()}"
    assert f"objective '{where}:fails_later' raised ValueError: the tokens are too rare at {where}, line 6, in step 1" in done.stderr


def test_own_code_that_cannot_work_is_refused_before_anything_is_started(tmp_path: Path, model_dir: str) -> None:
    run = SmallRun(tmp_path, model_dir)
    done = train(tmp_path, *run.arguments(algorithm__credit=f"{SUPPORT / 'own_credits.py'}:imports_torch"))
    assert done.returncode == 2 and "imports torch, which the controller never loads" in done.stderr
    assert not run.folder.exists()
