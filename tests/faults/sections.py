"""docs/faults.md in sections, each written by a command of its own; a section begins with its heading of the second level."""

import re
from collections.abc import Collection
from pathlib import Path

_HEADING = re.compile(r"^(?=## )", re.MULTILINE)


def write_section(document: Path, heading: str, body: str) -> None:
    """Put `body` below `heading`, in the place of what is there, or at the end."""
    parts = _split(document.read_text())
    section = f"## {heading}\n\n{body.strip()}\n\n"
    places = [i for i, part in enumerate(parts) if _heading(part) == heading] or [len(parts)]
    parts[places[0] : places[0] + 1] = [section]
    document.write_text("\n\n".join(part.strip() for part in parts) + "\n")


def other_sections(text: str, own: Collection[str]) -> str:
    """The sections of a document whose headings are not among `own`."""
    return "\n".join(part.strip() + "\n" for part in _split(text)[1:] if _heading(part) not in own)


def _split(text: str) -> list[str]:
    return _HEADING.split(text)


def _heading(part: str) -> str:
    return part.partition("\n")[0].removeprefix("## ") if part.startswith("## ") else ""
