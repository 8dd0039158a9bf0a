"""Parts of docs/faults.md that commands of their own write; each stands between two comments of its name."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "faults.md"
_SECTION = re.compile(r"^<!-- begin: (?P<name>.+) -->\n.*?^<!-- end: (?P=name) -->\n", re.DOTALL | re.MULTILINE)


def read_sections() -> dict[str, str]:
    """All of them by name, comments included."""
    return {match["name"]: match[0] for match in _SECTION.finditer(DOCUMENT.read_text())}


def write_section(name: str, text: str) -> None:
    """Put a section in the place of the one of its name, or at the end."""
    write_rest(_SECTION.sub("", DOCUMENT.read_text()), read_sections() | {name: f"<!-- begin: {name} -->\n{text}<!-- end: {name} -->\n"})


def write_rest(rest: str, sections: dict[str, str] | None = None) -> None:
    """Write all but the sections anew, which stay, or are those that are given."""
    sections = read_sections() if sections is None else sections
    DOCUMENT.write_text("\n".join([rest.rstrip() + "\n", *sections.values()]))
