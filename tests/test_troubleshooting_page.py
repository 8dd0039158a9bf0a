"""Every sentence on the page of troubleshooting is one that the source can say."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ELSEWHERE = {"`command not found`", "`offbeat: unexpected OutOfMemoryError`", "`….damaged`"}
"""Said by the shell, by torch, and by a suffix of a folder's name."""

ROWS = [line.split(" | ")[0].removeprefix("| ") for line in (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")]


@cache
def source() -> str:
    """All strings of the source, with `…` for what is filled in."""
    return "\n".join(_texts())


def _texts() -> Iterator[str]:
    for path in sorted((ROOT / "src" / "offbeat").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.mark.parametrize("quoted", [row for row in ROWS if row not in ELSEWHERE])
def test_a_quoted_sentence_can_be_said(quoted: str) -> None:
    words = [re.escape(part.strip()) for part in quoted.strip("`").split("…") if part.strip(" ;,.")]
    assert words and re.search(r"[^\n]*".join(words), source()), f"nothing in the source says {quoted}"
