"""Templates that make a prompt of a record's columns, as `data.prompt = "{question}\\nAnswer:"`.

A field in braces is the name of a column, of any characters; there are no attributes, indices, conversions or format specifications. `{{`
and `}}` stand for braces.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from offbeat.errors import DataError

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")


@dataclass(frozen=True)
class Template:
    """A parsed template: its pieces in order, each a text and whether that is the name of a column, such as ("question", True)."""

    pieces: tuple[tuple[str, bool], ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, each once, in order."""
        return tuple(dict.fromkeys(text for text, is_column in self.pieces if is_column))

    def fill(self, record: Mapping[str, Any], where: str) -> str:
        """Return the text for a record. Numbers are written as in Python, and lists, objects and truth values as JSON.

        Raises DataError if the record `where` lacks a column, or it is null there.
        """
        return "".join(_written(record, text, where) if is_column else text for text, is_column in self.pieces)


def parse_template(text: str) -> Template:
    """Parse a template; raises ValueError if a brace stands alone, a field has no name, or there is no field at all."""
    pieces: list[tuple[str, bool]] = []
    for match in _PIECE.finditer(text):
        piece = match[0]
        if piece in ("{", "}"):
            raise ValueError(
                f"it has a single {piece!r} at character {match.start()}; write {{column}} for a column, and {piece * 2!r} for the brace")
        if match[1] is not None and not match[1].strip():
            raise ValueError(f"it has a field without a name at character {match.start()}; write the name of a column in the braces")
        pieces.append((match[1], True) if match[1] is not None else ({"{{": "{", "}}": "}"}.get(piece, piece), False))
    if not any(is_column for _, is_column in pieces):
        raise ValueError("it names no column, so that all prompts would be equal; write {column} where a column's text is to stand")
    return Template(tuple(pieces))


def missing_column(name: str, record: Mapping[str, Any]) -> str:
    """Say that a record has no such column; name its columns and the nearest of them."""
    near = get_close_matches(name, record, n=1)
    return f"has no field {name!r}; it has {', '.join(record) or 'none'}" + (f"; did you mean {near[0]!r}?" if near else "")


def _written(record: Mapping[str, Any], name: str, where: str) -> str:
    if name not in record:
        raise DataError(f"{where}, {missing_column(name, record)}")
    value = record[name]
    if value is None:
        raise DataError(f"{where}: field {name!r}, which data.prompt names, is null")
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, bool | list | tuple | Mapping) else str(value)


def read_chat_template(given: str) -> str:
    """Return the text of a chat template that is given as text, or as the name of a file; raises ValueError if it is neither."""
    if "{" in given or "\n" in given:
        return given
    try:
        text = Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else "it is not UTF-8 text"
        raise ValueError(f"it must be true, false, a file with a chat template or its text, got {given!r} ({reason})") from exc
    if "{" not in text:
        raise ValueError(f"it must name a file with a chat template in Jinja, got {given!r}, in which nothing is inserted")
    return text
