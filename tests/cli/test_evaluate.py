"""`offbeat eval`: a real evaluation of a trained model."""

import json
from pathlib import Path

import pytest

from offbeat.cli import main as cli
from offbeat.cli.evaluate import print_table
from offbeat.controller.evaluate import Evaluation
from small_run import REWARDS, SmallRun


def test_an_exported_model_has_the_accuracy_that_its_run_ended_with(finished_run: SmallRun, tmp_path: Path, capsys) -> None:
    arguments = SmallRun(tmp_path, str(finished_run.folder / "export")).arguments(
        evaluate__sets__two__num_prompts="2", evaluate__sets__two__rollout__reward=f"{REWARDS}:right")
    assert cli.main(["eval", *arguments, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["eval/accuracy"] == json.loads((finished_run.folder / "result.json").read_text())["heldout_after"]
    assert metrics["eval/reward_mean"] == pytest.approx(finished_run.events("evaluation")[-1]["eval/reward_mean"])
    assert (metrics["eval/prompts"], metrics["eval/failed_prompts"]) == (4, 0)
    assert (metrics["eval/two/prompts"], metrics["eval/two/accuracy"], metrics["eval/two/failed_prompts"]) == (2, 1, 0)
    assert (tmp_path / "small-eval").is_dir() and not (tmp_path / "small").exists()


def test_a_missing_model_is_a_mistake(tmp_path: Path, capsys) -> None:
    assert cli.main(["eval", *SmallRun(tmp_path, "").arguments()]) == 2
    assert cli.main(["eval", *SmallRun(tmp_path, str(tmp_path / "gone")).arguments()]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "model.path is empty" in lines[0] and "gone" in lines[1]


def test_several_sets_are_a_table_with_the_columns_that_they_need(capsys) -> None:
    print_table([
        Evaluation(0.5, 0.625, 8, 0), Evaluation(0.25, 0.25, 128, 3, {1: 0.25, 4: 0.5}, "aime"),
        Evaluation(0.5, 0.0, 8, 0, {}, "games", {"x": 0.75, "o": 0.25})])
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "set       prompts  accuracy   95 % interval  mean reward  pass@1  pass@4      x      o  failed",
        "held-out        8     0.500  0.215 to 0.785        0.625                                     0",
        "aime          128     0.250  0.183 to 0.332        0.250   0.250   0.500                     3",
        "games           8     0.500  0.215 to 0.785        0.000                  0.750  0.250       0"]
