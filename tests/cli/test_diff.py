import json
import shutil
from pathlib import Path

import pytest

from offbeat.cli.main import main
from small_run import SmallRun


def test_a_run_does_not_differ_from_its_copy_and_a_metric_that_was_changed_is_named(
    finished_run: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(finished_run.folder, tmp_path / "copy")
    assert main(["diff", str(finished_run.folder), str(tmp_path / "copy")]) == 0
    assert "they do the same in all 2 steps that both have" in capsys.readouterr().out
    shutil.copytree(finished_run.folder, tmp_path / "begun", ignore=shutil.ignore_patterns("metrics.jsonl", "journal"))
    assert main(["diff", str(finished_run.folder), str(tmp_path / "begun")]) == 0
    assert "they have no step in common, so nothing is compared" in capsys.readouterr().out
    metrics = tmp_path / "copy" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"reward/std": 0', '"reward/std": 1'))
    assert main(["diff", str(finished_run.folder), str(tmp_path / "copy"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["parting"]["metric"] == "reward/std" and not found["changed"]


def test_settings_and_folders_without_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(tmp_path), str(tmp_path), "--run.seed", "1"]) == 2
    assert "diff takes no settings, got --run.seed" in capsys.readouterr().err
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 2
