"""What commands share."""

import argparse
import io
from pathlib import Path

import pytest

from offbeat.cli.common import add_config_argument, make_console, report_line
from offbeat.errors import DataError
from small_run import small_config


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_config_argument(parser)
    return parser.parse_args(words)


def shown(tmp_path: Path, *words: str, **changes: str) -> str:
    stream = io.StringIO()
    make_console(small_config(tmp_path, **changes), parse("a.toml", *words), stream).note("saved")
    return stream.getvalue()


def test_the_console_is_what_the_arguments_and_the_configuration_ask_for(tmp_path: Path) -> None:
    assert shown(tmp_path) == "  saved\n"
    assert shown(tmp_path, "--json") == '{"event": "note", "text": "saved"}\n'
    assert shown(tmp_path, telemetry__console="false") == ""


def test_the_report_is_written_and_its_place_is_told_unless_programs_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path)
    with pytest.raises(DataError):
        report_line(config, parse("a.toml"))
    config.run_dir.mkdir()
    (config.run_dir / "metrics.jsonl").write_text('{"global_step": 1, "reward/mean": 0.5}\n')
    report_line(config, parse("a.toml"))
    assert capsys.readouterr().out == f"report: {config.run_dir / 'report.html'}\n"
    report_line(config, parse("a.toml", "--json"))
    assert capsys.readouterr().out == ""
