"""Writes docs/commands.md from the parsers of all commands: `python tools/commands_page.py > docs/commands.md`.

tests/test_commands_page.py compares the page with what this would write.
"""

import argparse
from collections.abc import Iterator

from offbeat.cli.main import COMMANDS, build_parser

_HEAD = """\
# Commands

Every command is a subcommand of `offbeat`; `python -m offbeat` is the same. This page is generated from the parsers, and
`offbeat COMMAND --help` prints each part of it.

Commands that take a CONFIG also take any [setting](configuration.md) as `--section.key value`, which wins over the file. `--debug` shows
tracebacks and logs in detail. The exit code is 0 when all went well, 1 when a run failed, 2 when something that you gave cannot work, and
130 when you interrupted it.

"""


def render() -> str:
    """Render Markdown: for every command its text, its arguments and its examples."""
    sections = (section for command in COMMANDS for section in _commands(build_parser(command), "offbeat", only=command))
    return _HEAD + "\n".join(sections)


def _commands(parser: argparse.ArgumentParser, name: str, *, only: str = "") -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, nested in action.choices.items():
                if only in ("", word):
                    yield from _command(nested, f"{name} {word}")


def _command(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    yield f"## `{name}`\n"
    yield from _prose(parser.description or "")
    rows = [_row(action) for action in parser._actions if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)]
    if rows:
        yield "\n".join(["| argument | meaning |", "|---|---|", *rows]) + "\n"
    if parser.epilog:
        yield from _prose(parser.epilog)
    yield from _commands(parser, name)


def _prose(text: str) -> Iterator[str]:
    """Yield paragraphs; runs of indented lines, which are examples or lists, become blocks of code."""
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        if (lines and line.startswith("  ") != lines[0].startswith("  ")) or not line.strip():
            if lines:
                yield _block(lines)
            lines = []
        if line.strip():
            lines.append(line)


def _block(lines: list[str]) -> str:
    if lines[0].startswith("  "):
        return "\n".join(["```", *(line.removeprefix("  ") for line in lines), "```", ""])
    text = "\n".join(lines).replace("<", "&lt;")
    return f"{'Examples:' if text == 'examples:' else text}\n"


def _row(action: argparse.Action) -> str:
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else "")
    if isinstance(value, tuple):
        value = " ".join(value)
    if action.option_strings:
        takes = action.nargs != 0
        name = ", ".join(action.option_strings) + (f" {value or action.dest.upper().replace('_', '-')}" if takes else "")
    else:
        name = value or action.dest
    return f"| `{name.replace('|', chr(92) + '|')}` | {(action.help or '').replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    print(render(), end="")
