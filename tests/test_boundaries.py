"""What lies outside is met in few modules, which say in a sentence what went wrong there."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import offbeat

ROOT = Path(offbeat.__file__).parent
ALLOWED = {
    "shutil.rmtree": {"disk.py", "agents/tools/sandbox.py"},  # the second is handed what a program of the model's has left
    "import ray": {"workers/ray.py", "workers/ray_errors.py"},
    "import aiohttp.client": set(),
    "import requests": set(),
    "wall clock against a deadline": {"service/app/links.py"},  # the deadline is written into a link
}


def what(node: ast.AST) -> Iterator[str]:
    """Yield what a node meets of the outside."""
    if isinstance(node, ast.Import):
        yield from (f"import {name.name.partition('.')[0] if name.name.startswith('ray') else name.name}" for name in node.names)
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield f"import {node.module.partition('.')[0] if node.module.startswith('ray.') else node.module}"
    if isinstance(node, ast.Attribute) and ast.unparse(node) == "shutil.rmtree":
        yield "shutil.rmtree"
    if isinstance(node, ast.Compare) and any(ast.unparse(part) == "time.time()" for part in (node.left, *node.comparators)):
        yield "wall clock against a deadline"


@pytest.fixture(scope="module")
def meetings() -> set[tuple[str, str]]:
    """Each part of the outside with a module that meets it."""
    return {
        (each, path.relative_to(ROOT).as_posix())
        for path in ROOT.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for each in what(node)}


@pytest.mark.parametrize("outside", ALLOWED)
def test_only_these_modules_meet(meetings: set[tuple[str, str]], outside: str) -> None:
    assert {module for each, module in meetings if each == outside} == ALLOWED[outside]
