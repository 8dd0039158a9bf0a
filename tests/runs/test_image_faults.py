"""Faults of images in whole runs: each is caught before a step trains on it."""

import json
import os
from pathlib import Path

import pytest

from image_models import make_folder
from offbeat.cli.main import main
from runs.test_image_runs import write_rows

SUPPORT = Path(__file__).parents[1] / "support"


def play(folder: Path, *settings: str, head_dim: int = 8) -> tuple[int, list[int]]:
    """Return the exit code of a run, and the steps that it trained."""
    rows, model = write_rows(folder, 8), make_folder(folder / "model", "idefics3", head_dim=head_dim)
    code = main([
        "train", f"--model.path={model}", f"--run.dir={folder / 'runs'}", "--run.name=faulty",
        "--run.total_steps=3", f"--data.path={rows}", "--data.heldout_size=2", "--evaluate.every_steps=0", "--rollout.group_size=2",
        "--rollout.consumer_batch_size=2", "--rollout.max_new_tokens=3", "--rollout.reward=exact_match",
        "--rollout.max_failures_in_a_row=1", "--rollout.max_head_offpolicyness=0", "--rollout.max_retries=0",
        "--inference.max_context=128", "--inference.heal_timeout_s=2",
        "--checkpoint.every_steps=0", "--train.threads=1", "--inference.threads=1", *settings])
    lines = (folder / "runs" / "faulty" / "metrics.jsonl").read_text().splitlines()
    return code, [row["global_step"] for row in map(json.loads, lines) if "train/tokens" in row]


@pytest.mark.drill
@pytest.mark.parametrize(("workflow", "sentence"), [
    ("another_resize", "holds other pixel values than those that its id stands for"),
    ("swapped", "holds other pixel values than those that its id stands for"),
    ("too_few_in_training", "has 3 placeholders in a row of image"),
    ("too_few_in_sampling", "has 3 placeholders in a row of image")])
def test_a_run_trains_on_no_image_that_was_hurt(workflow, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OFFBEAT_TEST_IMAGES", str(tmp_path / "runs" / ".images"))
    code, steps = play(tmp_path, f"--rollout.workflow={SUPPORT / 'image_faults.py'}:{workflow}")
    assert code and not steps
    assert sentence in capsys.readouterr().err


@pytest.mark.drill
def test_a_run_trains_on_no_sample_of_a_stale_tower(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT / "stale_tower"), os.environ.get("PYTHONPATH", "")]))
    code, steps = play(tmp_path, f"--rollout.workflow={SUPPORT / 'image_faults.py'}:unhurt", "--train.optimizer.lr=1e-2")
    assert (code, steps) == (1, [1]), "version 1 is never served, so nothing is sampled for step 2"
    assert "fingerprint" in (tmp_path / "runs" / "faulty" / "events.jsonl").read_text() + capsys.readouterr().err
