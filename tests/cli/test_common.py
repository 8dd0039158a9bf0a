"""What commands share."""

import argparse
import asyncio
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from offbeat.aio import ASKED_TO_STOP, PRESSED, listener
from offbeat.cli import common
from offbeat.cli.common import add_config_argument, given_words, keep_private, make_console, report_line, run_console, telling_how_to_go_on
from offbeat.cli.main import build_parser, main
from offbeat.errors import CodeError, ConfigError, DataError, OffbeatError, RunError, StorageError
from offbeat.telemetry.console import Console
from small_run import small_config


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_config_argument(parser)
    return parser.parse_args(words)


def parse_command(command: str, *words: str) -> argparse.Namespace:
    config = [] if command == "quickstart" else ["a.toml"]
    return build_parser(command).parse_args([command, *config, *words])


def shown(tmp_path: Path, *words: str, **changes: str) -> str:
    stream = io.StringIO()
    make_console(small_config(tmp_path, **changes), parse("a.toml", *words), stream).note("saved")
    return stream.getvalue()


def test_the_console_is_what_the_arguments_and_the_configuration_ask_for(tmp_path: Path) -> None:
    assert shown(tmp_path) == "  saved\n"
    assert shown(tmp_path, "--json") == '{"event": "note", "text": "saved"}\n'
    assert shown(tmp_path, telemetry__console="false") == ""


@pytest.mark.parametrize(("private", "modes"), [("true", (0o700, 0o600)), ("false", (0o755, 0o644))])
def test_what_a_command_writes_is_for_its_user_alone_unless_asked_otherwise(tmp_path: Path, private: str, modes: tuple[int, int]) -> None:
    before = os.umask(0o022)
    try:
        keep_private(small_config(tmp_path, run__private=private))
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").touch()
    finally:
        os.umask(before)
    assert tuple((tmp_path / name).stat().st_mode & 0o777 for name in ("folder", "file")) == modes


def test_a_stopped_run_says_how_to_go_on_in_words_that_a_shell_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, args = small_config(tmp_path), parse("my task.toml")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "bin" / "offbeat"), "train", "my task.toml", "--run.total_steps", "9"])
    with telling_how_to_go_on(config, args, given_words()) as stopped:
        stopped()
    assert capsys.readouterr().out == f"to go on: {tmp_path}/bin/offbeat train 'my task.toml' --run.total_steps 9\n"
    monkeypatch.setattr("sys.argv", ["src/offbeat/__main__.py"])
    assert given_words("train", "config.toml") == [sys.executable, "-m", "offbeat", "train", "config.toml"]
    with telling_how_to_go_on(config, args, ["offbeat"]):
        pass
    with telling_how_to_go_on(config, parse("a.toml", "--json"), ["offbeat"]) as stopped:
        stopped()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("error", [CodeError, RunError, StorageError, ConfigError])
def test_a_run_that_fails_says_how_to_go_on_if_it_has_saved_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: type[OffbeatError],
) -> None:
    config = small_config(tmp_path)

    def failed(checkpoint: str) -> str:
        with pytest.raises(error), telling_how_to_go_on(config, parse("a.toml"), ["offbeat", "train", "a.toml"]):
            folder = config.run_dir / "checkpoints" / checkpoint
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "complete.json").touch()
            raise error("no")
        return capsys.readouterr().out

    assert failed("step-00000002") == ("" if error is ConfigError else "to go on: offbeat train a.toml\n")
    (config.run_dir / "checkpoints" / "step-00000002" / "complete.json").unlink(missing_ok=True)
    assert failed("step-00000002") == ("" if error is ConfigError else "to go on: offbeat train a.toml\n"), "it was written anew"


def test_a_run_that_fails_before_it_has_saved_says_nothing_of_an_older_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:
    config = small_config(tmp_path)
    (config.run_dir / "checkpoints" / "step-00000002").mkdir(parents=True)
    (config.run_dir / "checkpoints" / "step-00000002" / "complete.json").touch()
    with pytest.raises(RunError), telling_how_to_go_on(config, parse("a.toml"), ["offbeat", "train", "a.toml"]):
        raise RunError("no")
    assert capsys.readouterr().out == ""


def test_an_interrupted_run_says_how_to_go_on_if_it_has_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path, run__resume="false")

    def interrupted() -> str:
        with pytest.raises(KeyboardInterrupt), telling_how_to_go_on(config, parse("a.toml"), ["offbeat", "train", "a.toml"]):
            raise KeyboardInterrupt
        return capsys.readouterr().out

    assert interrupted() == ""
    (config.run_dir / "checkpoints" / "step-00000001").mkdir(parents=True)
    (config.run_dir / "checkpoints" / "step-00000001" / "complete.json").touch()
    assert interrupted() == "to go on: offbeat train a.toml --run.resume true\n"


def test_the_report_is_written_and_its_place_is_told_unless_programs_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(tmp_path)
    with pytest.raises(DataError):
        report_line(config, parse("a.toml"))
    config.run_dir.mkdir()
    (config.run_dir / "metrics.jsonl").write_text('{"global_step": 1, "reward/mean": 0.5}\n')
    report_line(config, parse("a.toml"))
    told = f"report: {config.run_dir / 'report.html'}\n"
    assert capsys.readouterr().out == told
    (config.run_dir / "export").mkdir()
    report_line(config, parse("a.toml"))
    assert capsys.readouterr().out == f"{told}model: {config.run_dir / 'export'}\n"
    report_line(config, parse("a.toml", "--json"))
    assert capsys.readouterr().out == ""


def test_the_live_page_is_there_for_a_run_whose_command_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    class Page:
        def __init__(self, run_dir: Path) -> None:
            self.run_dir = run_dir

        def __enter__(self) -> "Page":
            return self

        def __exit__(self, *_: object) -> None:
            print("closed")

        def open(self, console: Console) -> None:
            console.announce(f"page of {self.run_dir.name}")

    monkeypatch.setattr(common, "LivePage", Page)
    for words, shown in ((["--dashboard"], "  page of small\n  reading\nclosed\n"), ([], "  reading\nclosed\n")):
        with run_console(small_config(tmp_path), parse_command("train", *words)) as console:
            console.open("small")
            console.note("reading")
        assert capsys.readouterr().out == shown


@pytest.mark.parametrize("command", ["train", "sft", "dpo", "reward-model", "quickstart"])
def test_commands_that_train_take_the_wish_for_a_live_page(command: str) -> None:
    assert parse_command(command, "--dashboard").dashboard and not parse_command(command).dashboard


def train_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, in_step: Callable[[], object], in_report: Callable[[], object],
) -> int:
    """The exit code of a command whose run is one step long, and whose report is written when what `in_report` calls lets it."""
    def run(*_: object, **__: object) -> SimpleNamespace:
        asked: list[str] = []

        async def step() -> None:
            listener.get()(asyncio.get_running_loop(), asked.append)
            in_step()
            await asyncio.sleep(0)  # what a signal's handler has left to the loop

        asyncio.run(step())
        print(f"asked: {asked}")
        return SimpleNamespace(stopped_early=bool(asked))

    def report(_run_dir: Path) -> Path:
        in_report()
        return Path("the report")

    (tmp_path / "a.toml").touch()
    monkeypatch.setattr("offbeat.runs.run.run_training", run)
    monkeypatch.setattr(common, "write_report", report)
    return main(["train", str(tmp_path / "a.toml"), "--data.task", "sort_digits"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_report_is_written_changes_nothing_and_a_second_one_ends_the_command(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    other = signal.SIGINT if number == signal.SIGTERM else signal.SIGTERM
    before = [signal.getsignal(each) for each in (number, other)]

    def send(*numbers: signal.Signals) -> None:
        for each in numbers:
            os.kill(os.getpid(), each)

    assert train_with(monkeypatch, tmp_path, in_step=send, in_report=lambda: send(number)) == 0
    assert capsys.readouterr().out == "asked: []\nreport: the report\n"
    assert train_with(monkeypatch, tmp_path, in_step=lambda: send(number), in_report=send) == 130
    said = PRESSED if number == signal.SIGINT else ASKED_TO_STOP
    assert capsys.readouterr().out.startswith(f"asked: ['{said}']\nreport: the report\n")
    assert train_with(monkeypatch, tmp_path, in_step=send, in_report=lambda: send(number, other)) == 130
    assert capsys.readouterr() == ("asked: []\n", "offbeat: interrupted\n")
    assert train_with(monkeypatch, tmp_path, in_step=lambda: send(number), in_report=lambda: send(other)) == 130
    assert capsys.readouterr().err == "offbeat: interrupted\n"
    assert [signal.getsignal(each) for each in (number, other)] == before


def test_a_sigterm_of_a_job_that_comes_twice_stops_a_run_once_and_lets_its_report_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    def terminate() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    assert train_with(monkeypatch, tmp_path, in_step=terminate, in_report=terminate) == 130
    assert capsys.readouterr().out.startswith(f"asked: ['{ASKED_TO_STOP}']\nreport: the report\n")
