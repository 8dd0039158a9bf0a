"""`offbeat rollouts`."""

import json
import re
from pathlib import Path

import pytest

from offbeat.cli import rollouts
from offbeat.cli.main import main
from rollout_samples import group, trajectory, write_rollouts, write_small_run


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    write_small_run(tmp_path)
    return str(tmp_path)


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str) -> str:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["rollouts", *argv]) == 0
    return capsys.readouterr().out


def ids(text: str) -> list[str]:
    return re.findall(r"^(\d+r?\.\d+\.\d+)", text, re.MULTILINE)


def test_a_list_has_a_line_for_each_rollout_and_says_how_many_there_are(
    run_dir: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = call(capsys, monkeypatch, run_dir, "--limit", "3")
    assert ids(text) == ["3.0.0", "3.0.1", "2.0.0"]
    assert "the first 3 of 11 rollouts of 11" in text and "Name a fruit." in text and "Banana" in text


@pytest.mark.parametrize(("argv", "expected"), [
    (["--step", "2", "--status", "trained"], ["2.0.0", "2.0.1"]), (["--min-reward", "1"], ["3.0.0", "2.0.0", "1.0.0"]),
    (["--text", "is 42"], ["2.0.0", "1.0.0"]), (["--reason", "equal rewards"], ["2r.0.0", "2r.0.1"]),
    (["--same-prompt", "1.0.1", "--order", "oldest"], ["1.0.0", "1.0.1", "2.0.0", "2.0.1"]), (["--prompt", "no such"], []),
    (["--max-reward=-0.5"], ["2.0.1"]), (["--min-step", "3", "--max-length", "6"], ["3.0.1"])])
def test_filters(
    argv: list[str], expected: list[str], run_dir: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ids(call(capsys, monkeypatch, run_dir, *argv)) == expected
    lines = call(capsys, monkeypatch, run_dir, *argv, "--json").splitlines()
    assert [json.loads(line)["address"] for line in lines] == expected


def test_one_rollout_is_shown_as_a_conversation_beside_its_group(
    run_dir: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = call(capsys, monkeypatch, run_dir, "--show", "1.0.1")
    assert "What is 6 * 7?" in text and "── turn 1" in text and "Perhaps 41?" in text and "It is 42." in text
    assert ids(text) == ["1.0.0", "1.0.1"] and "reward 0" in text and "advantage -0.5" in text and "versions 3" in text
    whole = json.loads(call(capsys, monkeypatch, run_dir, "--show", "1.0.1", "--json"))
    assert [t["text"] for t in whole["trajectories"]] == ["What is 6 * 7? It is 42.", "What is 6 * 7? Perhaps 41?"]


def test_a_rejected_group_says_why_even_if_it_was_never_played(
    run_dir: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "The group was rejected (equal rewards): all rewards are 0" in call(capsys, monkeypatch, run_dir, "--show", "2r.0.1")
    assert "Too hard" in call(capsys, monkeypatch, run_dir, "--show", "2r.1.0")


def test_what_a_policy_wrote_cannot_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    nasty = "\x1b]0;owned\x07\x1b[2J[bold red]x[/]\r\u202e"
    write_rollouts(tmp_path, 1, [group(nasty, trajectory(nasty, nasty, 1.0, reason=f"stop: {nasty}"), index=0)])
    for argv in ([], ["--show", "1.0.0"]):
        text = call(capsys, monkeypatch, str(tmp_path), *argv)
        assert "\x1b" not in text and "\x07" not in text and "\r" not in text and "\u202e" not in text
        assert "[bold red]x[/]" in text


@pytest.mark.parametrize("columns", ["80", "120", "40", ""])
def test_long_texts_are_shortened_and_ids_rewards_and_tokens_never(
    columns: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    question = "Please sort the following list of numbers, from small to large: " * 20
    write_rollouts(tmp_path, 1234, [group(question, ("It is rather long. " * 30, 0.3333), ("Short.", -12.25), index=0)])
    monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS", raising=False)
    for argv in ([], ["--show", "1234.0.0"]):
        assert main(["rollouts", str(tmp_path), *argv]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines() if re.match(r"1234\.0\.\d ", line)]
        assert [(line[0], line[1]) for line in lines] == [("1234.0.0", "0.3333"), ("1234.0.1", "-12.25")]
        assert "570" in lines[0] and "6" in lines[1]


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("100", 100), ("", 120)])
def test_a_list_is_as_wide_as_the_terminal_and_into_a_pipe_120_columns(
    columns: str, width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_rollouts(tmp_path, 1, [group("a question " * 90, ("an answer " * 90, 1.0), index=0)])
    monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["rollouts", str(tmp_path)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("1.0.0 "))
    assert width - 4 <= len(line.rstrip()) <= width and line.count("…") == 2


@pytest.mark.parametrize(("argv", "said"), [
    (["--show", "../../etc"], "a rollout is named by step, group and sample"), (["--show", "9.0.0"], "has no rollout 9.0.0"),
    (["--show", "1.0.7"], "has no rollout 1.0.7"),
    (["--text", "<>"], "give letters or digits"), (["--limit", "0"], "must be at least 1 and at most 2^53, got 0"),
    (["--limit", "9" * 20], "must be at least 1 and at most 2^53, got 9"), (["--step", "9" * 20], "--step must be a number within 2^53"),
    (["--min-length", "9" * 20], "--min-length must be a number within 2^53"), (["--max-reward", "nan"], "--max-reward must be a number"),
    (["--run.name", "x"], "takes no settings, got --run.name")])
def test_what_cannot_be_asked_is_one_sentence(argv: list[str], said: str, run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", run_dir, *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("offbeat: ") and said in line


def test_a_folder_that_is_no_run_and_one_without_rollouts_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", str(tmp_path)]) == 2 and "is not a run's folder" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").touch()
    assert main(["rollouts", str(tmp_path)]) == 0 and "has kept no rollouts yet" in capsys.readouterr().out


@pytest.mark.parametrize(("prompt", "shown"), [
    ("system: Answer briefly.\nuser: 1 + 1", "1 + 1"), ("user: a\nassistant: b\nuser: c\nd", "c\nd"), ("system: alone", "system: alone"),
    ("The user: who\nuser: I", "The user: who\nuser: I")])
def test_of_a_chat_the_last_user_message_is_listed(prompt: str, shown: str) -> None:
    assert rollouts._asked(prompt) == shown
