"""`offbeat launch slurm`: where the script goes, and what is said of it."""

from pathlib import Path

import pytest

from offbeat.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "sort_digits.toml"


def test_the_script_is_printed_with_settings_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "slurm", str(EXAMPLE), "--gpus-per-node", "4", "--sbatch=--requeue", "--run.total_steps", "7"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=offbeat-sort_digits\n") and "#SBATCH --requeue\n" in text
    assert f'"$python" -m offbeat train {EXAMPLE} --run.total_steps=7 &' in text


def test_a_file_is_made_executable_and_its_assumptions_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.sh"
    assert main(["launch", "slurm", str(EXAMPLE), "--output", str(path)]) == 0
    assert path.stat().st_mode & 0o111
    said = capsys.readouterr().out
    assert "What this script assumes:\n- This folder" in said and said.endswith(f"submit it with: sbatch {path}\n")


def test_what_cannot_work_ends_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "slurm", str(EXAMPLE), "--output", str(tmp_path / "none" / "job.sh")]) == 2
    assert "job.sh cannot be written: No such file or directory; give another --output" in capsys.readouterr().err
    assert main(["launch", "slurm", str(EXAMPLE), "--time", "1week"]) == 2
    assert "--time must be minutes, minutes:seconds," in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "--help"])
    assert "examples:" in capsys.readouterr().out
