"""Lays out the help of all commands in lines of at most 100 columns, fewer on a narrower terminal. The parsers of `offbeat.cli` use it."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

_COLUMNS = 100
_LABELS = 16
"""Columns for an argument's name beside its explanation."""
_DESCRIBED = re.compile(r"( +\S.*?  +)(\S.*)")
_WORD = r"""(?:'[^']*'|"[^"]*"|[^\s'"])+"""
_TOGETHER = re.compile(rf"(?:-[^\s=]+ (?!-))?{_WORD}")
"""A word, or an option with its value, e.g. `--name first`."""


class CommandParser(argparse.ArgumentParser):
    """The parser of a command; its help is laid out by `HelpFormatter`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **settings})


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills paragraphs of descriptions, and keeps their lists and examples line by line."""

    def __init__(self, prog: str) -> None:
        columns = min(_COLUMNS, shutil.get_terminal_size().columns)
        super().__init__(prog, width=columns - 2, max_help_position=_LABELS + 8)
        self._columns = columns

    def _fill_text(self, text: str, width: int, indent: str) -> str:  # noqa: ARG002 - argparse's signature
        return "\n".join(indent + line for line in wrapped(text, self._columns))


def wrapped(text: str, columns: int) -> Iterator[str]:
    r"""Yield the lines of a text: paragraphs filled, described items with a hanging indent, and long shell commands ended with \.

    Indented lines are items, e.g. `  show   the resolved configuration`, or commands. A line that is indented deeper continues an item.
    """
    for line in _joined(text):
        if len(line) <= columns:
            yield line
        elif not line.startswith(" "):
            yield from textwrap.wrap(line, columns, break_long_words=False, break_on_hyphens=False)
        elif item := _DESCRIBED.fullmatch(line):
            yield from textwrap.wrap(
                item[2], columns, initial_indent=item[1], subsequent_indent=" " * len(item[1]), break_long_words=False,
                break_on_hyphens=False)
        else:
            yield from _command(line, columns)


def _joined(text: str) -> list[str]:
    """Return paragraphs and items as one line each."""
    lines: list[str] = []
    for line in text.splitlines():
        before = lines[-1] if lines else ""
        is_prose = before and line and not (line[0].isspace() or before[0].isspace() or before.endswith(":"))
        if is_prose or (line.startswith("    ") and before.startswith("  ")):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return lines


def _command(line: str, columns: int) -> Iterator[str]:
    """Yield a shell command over several lines; a quoted word stays whole, and an option with its value."""
    indent = " " * (len(line) - len(line.lstrip()))
    written = ""
    for word in _TOGETHER.findall(line):
        if written and len(f"{written} {word} \\") > columns:
            yield f"{written} \\"
            written = f"{indent}    {word}"
        else:
            written = f"{written} {word}" if written else f"{indent}{word}"
    yield written
