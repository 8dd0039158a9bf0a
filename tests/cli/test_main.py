"""The command itself: which subcommands there are, and how mistakes, failures and interrupts read."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offbeat.cli import common
from offbeat.cli import main as cli
from offbeat.errors import ConfigError, WorkerError
from small_run import offbeat

SOURCE = Path(cli.__file__).parents[2]


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run_training(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("offbeat.runs.run.run_training", run_training)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(f'[data]\ntask = "sort_digits"\n[run]\ndir = "{tmp_path}"\n')
    return str(path)


def test_a_mistake_is_one_sentence_and_exit_code_2(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", config, "--rollout.group_size", "0"]) == 2
    assert cli.main(["train", "no-such.toml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("offbeat: ") and "rollout.group_size" in lines[0]
    assert "no-such.toml" in lines[1]


@pytest.mark.parametrize(("words", "told"), [
    (["train", "run.toml", "--lr", "1e-4"], "--lr is not an option of 'offbeat train'; did you mean --train.optimizer.lr or"),
    (["train", "--max-steps=3", "run.toml"], "--max-steps is not an option of 'offbeat train'; did you mean --run.total_steps?"),
    (["train", "run.toml", "--beta", "1"], "--beta is not an option of 'offbeat train'; did you mean --algorithm.kl_coefficient or"
     " --preference.beta? --algorithm.kl_coefficient acts with --algorithm.kl_loss k3"),
    (["train", "run.toml", "--colour"], "--colour is not an option of 'offbeat train'; 'offbeat train --help' lists them"),
    (["report", "runs/a", "runs/b"], "'offbeat report' has no use for 'runs/b'; 'offbeat report --help' shows what it takes"),
    (["trian", "run.toml"], "trian is not a command; did you mean train?"),
    (["fly"], "fly is not a command; 'offbeat --help' lists them"),
])
def test_a_word_that_the_command_does_not_understand_is_answered_with_what_it_may_have_meant(words, told, capsys) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith(f"offbeat: {told}")


def test_all_words_that_the_command_does_not_understand_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--lr", "1e-4", "--rollout.groups", "8", "--beta=-1", "--max-steps", "-3", "--beta=-1", "--run.sed=2"]
    assert cli.main(["train", "run.toml", *words]) == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "offbeat: 5 things are wrong:"
    assert [line.split(";")[0] for line in others] == [
        "  --lr is not an option of 'offbeat train'", "  rollout.groups is not a setting", "  --beta is not an option of 'offbeat train'",
        "  --max-steps is not an option of 'offbeat train'", "  run.sed is not a setting"]
    assert "did you mean rollout.group_size?" in others[1] and "did you mean --run.total_steps?" in others[3]


def test_the_bare_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr().err
    assert "usage: offbeat" in shown and "quickstart" in shown and "train with reinforcement learning" in shown


def test_a_failed_run_shows_what_its_processes_said_and_last_the_cause_and_exits_with_1(config, capsys, monkeypatch) -> None:
    error = WorkerError("rank 1 (process 7) exited with code 3 in save")
    error.add_note("rank 0: waited for rank 1 at 'save_recover'")
    error.add_note("last lines of rank-1.log:\nout of memory")
    fail_with(monkeypatch, error)
    assert cli.main(["train", config]) == 1
    assert capsys.readouterr().err == (
        "last lines of rank-1.log:\nout of memory\n"
        "offbeat: rank 1 (process 7) exited with code 3 in save\n"
        "  rank 0: waited for rank 1 at 'save_recover'\n")


def test_notes_of_a_mistake_are_not_shown(config, capsys, monkeypatch) -> None:
    error = ConfigError("x must be 1, got 2")
    error.add_note("traceback in rank 0: ...")
    fail_with(monkeypatch, error)
    assert cli.main(["train", config]) == 2
    assert capsys.readouterr().err == "offbeat: x must be 1, got 2\n"


def test_debug_shows_the_traceback_wherever_it_stands(config, monkeypatch) -> None:
    fail_with(monkeypatch, ConfigError("x must be 1, got 2"))
    for words in (["--debug", "train", config], ["train", config, "--debug"]):
        with pytest.raises(ConfigError):
            cli.main(words)


def test_an_interrupt_is_exit_code_130(config, capsys, monkeypatch) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    assert cli.main(["train", config]) == 130
    assert capsys.readouterr().err == "offbeat: interrupted\n"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: offbeat {command}" in capsys.readouterr().out


def test_the_command_imports_neither_torch_nor_ray() -> None:
    code = "import sys, offbeat.cli.main; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_runs_as_a_module_and_a_closed_pipe_is_no_error() -> None:
    assert "usage: offbeat" in offbeat("--help").stdout
    code = f"{sys.executable} -m offbeat config docs | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "0" and done.stderr == ""


@contextmanager
def loading(tmp_path: Path, *, background: bool = False) -> Iterator[subprocess.Popen[str]]:
    """The command at a moment in which it loads a library; `background`: as a script starts it with nohup and &."""

    def set_signals() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if background else signal.SIG_DFL)

    (tmp_path / "pydantic.py").write_text(
        "import signal, time\nprint(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, flush=True)\n"
        "try:\n    time.sleep(60)\nfinally:\n    print('an exception went through the library', flush=True)\n")
    with subprocess.Popen(
            [sys.executable, "-m", "offbeat", "config", "show"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{SOURCE}"}, preexec_fn=set_signals) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{background}\n", "SIGHUP is left as it was"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_libraries_load_is_one_line(number: signal.Signals, background: bool, tmp_path: Path) -> None:
    with loading(tmp_path, background=background) as process:
        process.send_signal(number)
        out, error = process.communicate(timeout=50)
    assert (process.returncode, out, error) == (130, "", "offbeat: interrupted\n")


def test_closed_streams_are_opened_on_nothing_before_a_socket_takes_their_numbers() -> None:
    program = (
        "import os, sys; from offbeat.__main__ import _fill_closed_streams; _fill_closed_streams();"
        "print('lost'); print('lost', file=sys.stderr);"
        "end = os.open('/dev/null', os.O_RDONLY); sys.exit(40 + (end > 2) + os.get_inheritable(1))")
    done = subprocess.run(
        ["sh", "-c", f'exec "{sys.executable}" -c "{program}" <&- >&- 2>&-'], check=False, env=os.environ | {"PYTHONPATH": str(SOURCE)})
    assert done.returncode == 42


def test_a_command_whose_reader_goes_away_trains_on_if_it_trains_and_else_ends(config: str, monkeypatch, capsys) -> None:
    def print_much(*_: object, **__: object) -> None:
        for line in range(3):
            print(line, flush=True)
        trained.append(line)

    trained: list[int] = []
    monkeypatch.setattr("offbeat.runs.run.run_training", print_much)
    monkeypatch.setattr(common, "report_line", lambda *_: None)
    for words, goes_on in ((["train", config], True), (["config", "docs"], False)):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w", encoding="utf-8") as pipe:
            monkeypatch.setattr(sys, "stdout", pipe)
            assert cli.main(words) == 0
        assert ("Broken pipe" in capsys.readouterr().err) is goes_on
    assert trained == [2]
