"""`offbeat report`."""

import argparse
from pathlib import Path

import pytest

from offbeat.cli import report
from offbeat.cli.main import main
from offbeat.errors import DataError


def call(*argv):
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return report.run(parser.parse_args(argv))


def test_the_path_of_the_report_is_printed(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"global_step": 1, "reward/mean": 0.5}\n')
    assert call(str(tmp_path)) == 0
    assert Path(capsys.readouterr().out.strip()) == tmp_path / "report.html"
    assert (tmp_path / "report.html").exists()


def test_a_folder_that_is_no_run_and_settings_are_refused(tmp_path, capsys):
    with pytest.raises(DataError):
        call(str(tmp_path))
    assert main(["report", str(tmp_path), "--run.name", "x"]) == 2
    assert "report takes no settings, got --run.name; a report shows the run as it was configured" in capsys.readouterr().err
