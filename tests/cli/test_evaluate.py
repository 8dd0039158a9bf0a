"""`offbeat eval`: a real evaluation of a trained model."""

import json
from pathlib import Path

import pytest

from offbeat.cli import main as cli
from small_run import SmallRun


def test_an_exported_model_has_the_accuracy_that_its_run_ended_with(finished_run: SmallRun, tmp_path: Path, capsys) -> None:
    arguments = SmallRun(tmp_path, str(finished_run.folder / "export")).arguments()
    assert cli.main(["eval", *arguments, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["eval/accuracy"] == json.loads((finished_run.folder / "result.json").read_text())["heldout_after"]
    assert metrics["eval/reward_mean"] == pytest.approx(finished_run.events("evaluation")[-1]["eval/reward_mean"])
    assert (metrics["eval/prompts"], metrics["eval/failed_prompts"]) == (4, 0)
    assert (tmp_path / "small-eval").is_dir() and not (tmp_path / "small").exists()


def test_a_missing_model_is_a_mistake(tmp_path: Path, capsys) -> None:
    assert cli.main(["eval", *SmallRun(tmp_path, "").arguments()]) == 2
    assert cli.main(["eval", *SmallRun(tmp_path, str(tmp_path / "gone")).arguments()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "model.path is empty" in lines[0] and "gone" in lines[1]
