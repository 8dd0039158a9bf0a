"""The check of private attributes and of operators in strings: they fit, planted faults are found, and none in the sources is missed."""

import ast
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import offbeat

ROOT = Path(offbeat.__file__).parent
TOOL = Path(__file__).parents[1] / "tools" / "private_interfaces.py"
OTHERS = {"_exit", "_current_frames", "_actions", "_SubParsersAction", "_max_workers"}
"""Private names of Python's own library."""

REACHED = {"_varlen_attn", "_varlen_attn_backward", "_schema"}
"""Operators reached through a variable, which operator_schemas.py follows."""

Use = tuple[str, str]
"""A name, and the file that uses it."""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The tool, as a module."""
    spec = importlib.util.spec_from_file_location("private_interfaces", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["private_interfaces"] = module
    sys.path.insert(0, str(TOOL.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.AST) -> Iterator[str]:
    """Yield what a module defines: functions, classes, and attributes and variables that are assigned."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls", "own"):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def uses_in(source: str, file: str, known: frozenset[str] = frozenset()) -> set[Use]:
    """Return private attributes of objects and operators in strings; `known` are names that other modules of ours define."""
    tree = ast.parse(source)
    own = {*own_names(tree), *OTHERS}
    imported = {
        each.asname or each.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)
        for each in node.names}  # what is reached from these is seen by operator_schemas.py
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            base = ast.unparse(node.value)
            inherited = base in ("self", "cls", "super()") and node.attr in known
            found |= set() if inherited or base.partition(".")[0] in imported else {node.attr}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            space, colons, operator = node.value.partition("::")
            found |= {operator} if colons and space.isidentifier() and operator.isidentifier() else set()
    return {(name, file) for name in found} - {(name, "model/varlen.py") for name in REACHED}


def sources() -> Iterator[tuple[str, str]]:
    """Yield the sources that run beside torch, and their paths; those in `engine/inside` belong to vLLM, which checks them as it starts."""
    for path in sorted(ROOT.rglob("*.py")):
        if "inside" not in path.parts:
            yield path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()


def calls_in(source: str, name: str) -> Iterator[tuple[int, set[str], bool]]:
    """Yield number of positional arguments, names of the others, and whether more follow with a star, of all calls by that name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and f".{ast.unparse(node.func)}".endswith(f".{name}"):
            given = [each for each in node.args if not isinstance(each, ast.Starred)]
            yield len(given), {each.arg for each in node.keywords if each.arg}, len(given) < len(node.args)


def called_name(interface) -> str:
    """Return the last part of an interface's name, without the overload."""
    return interface.name.partition("::")[2].partition(".")[0] if interface.is_operator else interface.name.split(".")[-1]


def test_every_interface_fits_the_installed_versions(tool, capsys):
    assert tool.main([]) == 0, capsys.readouterr().out
    head, *lines = capsys.readouterr().out.splitlines()
    assert f"torch build {torch.__version__}" in head
    assert len(lines) == len(tool.INTERFACES) and all(line.endswith(": fits") for line in lines)


@pytest.mark.parametrize(("name", "positional", "more", "said"), [
    ("torch_attn::_varlen_attn", 15, {}, "takes 14 arguments by position, and is given 15"),
    ("mkldnn::_linear_pointwise", 5, {}, "wants algorithm too"),
    ("mkldnn::_no_such_operator", 0, {}, "is gone"),
    ("mkldnn::_linear_pointwise.no_such_overload", 0, {}, "is gone"),
    ("mkldnn::_is_mkldnn_bf16_supported", 0, {"num_results": 2}, "has 1 results, and not 2"),
    ("torch._guards.no_such_name", 0, {}, "is gone"),
    ("torch.no_such_module.name", 0, {}, "is gone"),
    ("torch.distributed.distributed_c10d._set_pg_timeout", 3, {}, "too many positional arguments"),
    ("torch.utils._pytree.tree_leaves", 0, {}, "missing a required argument"),
    ("torch._guards.detect_fake_mode", 0, {"keywords": ("planted",)}, "unexpected keyword argument 'planted'"),
])
def test_a_planted_fault_is_found(tool, capsys, name, positional, more, said):
    names = known_names(tool, name, positional)
    planted = tool.Interface(name, "planted.py", (tool.Call(names, **more),), needs="torch.nn.attention.varlen")
    assert tool.main([], [planted]) == 1
    assert said in capsys.readouterr().out


def known_names(tool, name, number):
    """Return names of that many arguments: the right ones, as far as there are any."""
    if "::" not in name or not number:
        return tuple(f"argument_{i}" for i in range(number))
    arguments = tool._operator(tool.Interface(name, "", needs="torch.nn.attention.varlen"))._schema.arguments
    return tuple(each.name for each in arguments[:number]) + ("planted",) * (number - len(arguments))


def test_arguments_that_changed_places_are_found(tool):
    swapped = tool.Interface("torch.distributed.distributed_c10d._set_pg_timeout", "", (tool.call("group", "timeout"),))
    assert list(tool.differences(swapped)) == ["argument group is now timeout", "argument timeout is now group"]
    swapped = tool.Interface("mkldnn::_reorder_linear_weight", "", (tool.call("batch_size", "self"),))
    assert next(tool.differences(swapped)) == "argument 1 is self, and not batch_size"


def test_an_argument_that_is_told_only_where_it_is_known_may_be_missing(tool):
    with_unknown = tool.Interface("mkldnn::_reorder_linear_weight", "", (tool.call("self", "batch_size", if_known="planted"),))
    assert list(tool.differences(with_unknown)) == []


def test_json_has_the_versions_and_what_differs(tool, capsys):
    assert tool.main(["--json"], [tool.Interface("torch._guards.no_such_name", "planted.py")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch build"] == torch.__version__
    [planted] = found["interfaces"]
    assert planted["file"] == "planted.py" and planted["differences"][0].startswith("is gone")


def test_the_table_has_every_use_in_the_sources_and_no_other(tool):
    modules = list(sources())
    known = frozenset(name for source, _ in modules for name in own_names(ast.parse(source)))
    used = {use for source, file in modules for use in uses_in(source, file, known)}
    parts = {(part, each.file) for each in tool.INTERFACES for part in (each.name, *each.name.replace("::", ".").split("."))}
    assert used - parts == set(), "used, and not in the table"
    text = {file: source for source, file in modules}
    stale = [each for each in tool.INTERFACES if called_name(each) not in text[each.file]]
    assert stale == [], "in the table, and not used"


@pytest.mark.parametrize(("line", "name"), [
    ("parameter._planted = 1", "_planted"),
    ("KEPT = {'aten::planted'}", "planted"),
])
def test_a_use_that_is_planted_is_seen(line, name):
    assert (name, "planted.py") in uses_in(f"import torch\n{line}\n", "planted.py")


def test_the_table_gives_the_arguments_that_the_sources_give(tool):
    text = {file: source for source, file in sources()}
    for each in (each for each in tool.INTERFACES if each.calls):
        overload = each.name.partition("::")[2]
        for number, keywords, starred in [*calls_in(text[each.file], overload)] or calls_in(text[each.file], called_name(each)):
            bound = each.is_operator or not any(call.positional[:1] == ("self",) for call in each.calls)
            assert any(
                number + (not bound) == len(call.positional) and keywords == set(call.keywords) and starred == bool(call.if_known)
                for call in each.calls
            ), f"{each.file} calls {each.name} with {number} arguments and {sorted(keywords)}, which the table does not say"
