"""The page on security names every probe, and no other."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_on_security_has_a_row_for_every_probe() -> None:
    named = re.findall(r"\| `(test_\w+)` \|$", (ROOT / "docs" / "security.md").read_text(), re.MULTILINE)
    probes = [
        node.name for path in sorted((ROOT / "tests" / "probes").glob("test_*.py")) for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert sorted(named) == sorted(probes), set(named) ^ set(probes)
