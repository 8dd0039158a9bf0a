"""The layout of help."""

import argparse
import re
from pathlib import Path

import pytest

from offbeat.cli.help import HelpFormatter, wrapped
from offbeat.cli.main import COMMANDS, build_parser, main


def test_paragraphs_are_filled_items_hang_and_commands_go_on_after_a_backslash() -> None:
    text = "one two three\nfour five\n\n  show   say what it is\n         and more\n"
    text += "  go --name 'a b' --other 12 --last\nexamples:\n  x\n"
    assert list(wrapped(text, 20)) == [
        "one two three four", "five", "", "  show   say what it", "         is and more", "  go --name 'a b' \\",
        "      --other 12 \\", "      --last", "examples:", "  x"]
    assert list(wrapped("  python -c 'a quoted word stays whole'", 20)) == ["  python \\", "      -c 'a quoted word stays whole'"]


def help_of(command: str) -> str:
    parser = build_parser(command)
    if command:
        (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        parser = commands.choices[command]
    assert parser.formatter_class is HelpFormatter
    return parser.format_help()


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_at_most_100_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert [line for line in help_of(command).splitlines() if len(line) > 100 and not line.startswith('      -c "')] == []


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_names_no_file_of_the_repository_which_a_wheel_lacks(command: str) -> None:
    assert re.findall(r"\b(?:docs|examples|deploy|benchmarks|tests|tools)/\S*", help_of(command)) == []


def test_a_narrow_terminal_has_narrow_paragraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    description = build_parser("").format_help().partition("train:")[0]
    assert max(map(len, description.splitlines())) <= 60


def test_commands_are_listed_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: offbeat [-h] [--version] [--debug] COMMAND ...\n")
    for group in ("train", "data and evaluation", "runs", "serving", "machine"):
        assert f"\n\n{group}:\n  " in shown
    assert all(f"\n  {name:<12}  {command.summary}\n" in shown for name, command in COMMANDS.items())
    assert Path(__file__).parents[2].joinpath("docs", "commands.md").read_text().count("\n## `offbeat ") == len(COMMANDS)
