"""Follows the whole configuration from `run_training` through the modules of a package: which files hold it, and where it climbs.

`structure.py` prints both figures. As in `source_figures.py`, sources are read as text, and each docstring says which cases count.
"""

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from source_figures import FUNCTION, Found, Module, Modules, Node, Spot, last_name, names_in, parameters

_PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
_MODULE = re.compile(r"\w+(\.\w+)+(:\w+)?$")


class _Holder(NamedTuple):
    """A class with the configuration in fields: the path of its module, and the fields' names."""

    path: str
    fields: set[str]


def config_files(modules: Modules) -> Found:
    """Files that hold the whole `Config` below `run_training`: those that its module imports or names, directly or not, outside `config`.

    A file holds it that has a parameter, a field or a variable annotated `Config`, calls a method of the class, as in
    `Config.model_validate(...)`, or reads the field of a type that has one, as in `parts.config` with `parts: RunParts`. A module is named
    in a string, such as "offbeat.trainer.worker:TrainWorker".
    """
    holders = _holders_in(modules)
    held = []
    for module in _below_run_training(modules):
        lines = [each.lineno for each, _ in _annotated(module) if _is_config(each.annotation, module)]
        attributes = [each for each, _ in module.nodes[ast.Attribute] if isinstance(each.value, ast.Name)]
        lines += [each.lineno for each in attributes if _is_config(each.value, module)]
        lines += [node.lineno for node, _ in _fields_read(module, holders)]
        if lines:
            held.append(Spot(module.path, f"{module.path}:{min(lines)}"))
    return Found(len(held), held)


def config_climbs(modules: Modules) -> Found:
    """How often a module below `run_training` gets the whole `Config` from a lower one; each pair of modules counts once.

    A module is lower whose folder is in a lower layer of `pyproject.toml`, or in the same layer if the other imports it, directly or not.
    It hands the configuration up in four ways: a class of it has one in a field that the higher module reads, as in `parts.config`; a
    function of it returns one; it names, in a string, a function of the higher module that takes one; or it has a parameter or a field
    that is a callable which takes one, and the higher module imports it.
    """
    below, floors, imports = _below_run_training(modules), _floors(), _imports_of(modules)
    handed = [*_read_from_fields(below, _holders_in(modules)), *_returned(below), *_named(below), *_called_back(below)]
    climbs: dict[tuple[str, str], Spot] = {}
    for lower, higher, line in handed:
        drop = _floor_of(lower, floors) - _floor_of(higher, floors)
        if drop > 0 or (drop == 0 and lower != higher and lower in _reached_from(higher, imports)):
            climbs.setdefault((lower, higher), Spot(f"{lower} -> {higher}", f"{higher}:{line}"))
    return Found(len(climbs), list(climbs.values()))


def _read_from_fields(modules: Modules, holders: Mapping[str, _Holder]) -> Iterator[tuple[str, str, int]]:
    for module in modules:
        for node, holder in _fields_read(module, holders):
            yield holders[holder].path, module.path, node.lineno


def _returned(modules: Modules) -> Iterator[tuple[str, str, int]]:
    """Yield calls of other modules' functions that return the configuration."""
    makers = {_dotted(module, node.name): module.path for module in modules for node in module.tree.body
              if isinstance(node, FUNCTION) and node.returns is not None and _is_config(node.returns, module)}
    for module in modules:
        for node, _ in module.nodes[ast.Call]:
            if path := makers.get(module.imported.get(last_name(node.func), "").partition(".")[2]):
                yield path, module.path, node.lineno


def _named(modules: Modules) -> Iterator[tuple[str, str, int]]:
    """Yield functions and classes that take the configuration and that another module names as "offbeat.spmd.rank:open_rank"."""
    takers = {}
    for module in modules:
        for node, name in module.functions:
            if any(each.annotation is not None and _is_config(each.annotation, module) for each in parameters(node)):
                takers[_dotted(module, name.partition(".")[0])] = module.path, node.lineno
    for module in modules:
        words = {each.value for each, _ in module.nodes[ast.Constant] if isinstance(each.value, str)}
        named = [word.replace(":", ".") for word in words if _MODULE.match(word)]
        for name in {*named, *(f"{each}.{word}" for each in named for word in words)}:
            if taker := takers.get(name.partition(".")[2]):
                yield module.path, *taker


def _called_back(modules: Modules) -> Iterator[tuple[str, str, int]]:
    """Yield importers of the functions and classes that have callables which take the configuration."""
    callers = {}
    for module in modules:
        for each, name in _annotated(module):
            called = [node for node in ast.walk(each.annotation) if isinstance(node, ast.Subscript) and last_name(node.value) == "Callable"]
            if any(_is_config(node.slice, module) for node in called):
                callers[_dotted(module, name.partition(".")[0])] = module.path
    for module in modules:
        for name in module.imported.values():
            if path := callers.get(name.partition(".")[2]):
                yield path, module.path, 1


def _holders_in(modules: Modules) -> dict[str, _Holder]:
    """Return the classes that have the configuration in a field, by their names."""
    holders: dict[str, _Holder] = {}
    for module in modules:
        for node, _ in module.nodes[ast.ClassDef]:
            annotated = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            fields = {last_name(each.target) for each in annotated if _is_config(each.annotation, module)}
            if fields:
                holders[node.name] = _Holder(module.path, fields)
    return holders


def _annotated(module: Module) -> Iterator[Node]:
    """Yield the parameters, fields and variables that have an annotation."""
    yield from (each for each in (*module.nodes[ast.arg], *module.nodes[ast.AnnAssign]) if each.node.annotation is not None)


def _fields_read(module: Module, holders: Mapping[str, _Holder]) -> Iterator[tuple[ast.Attribute, str]]:
    """Yield where a module reads the configuration from a field, with the name of the class that has it."""
    held = {}
    for each, _ in _annotated(module):
        for holder in names_in(each.annotation) & holders.keys():
            name = last_name(each.target) if isinstance(each, ast.AnnAssign) else each.arg
            held.update({(name, field): holder for field in holders[holder].fields})
    for node, _ in module.nodes[ast.Attribute]:
        if holder := held.get((last_name(node.value).lstrip("_"), node.attr)):
            yield node, holder


def _is_config(annotation: ast.expr, module: Module) -> bool:
    return "Config" in names_in(annotation) and module.imported.get("Config", "").endswith("config.root.Config")


def _below_run_training(modules: Modules) -> list[Module]:
    """Return the module that defines `run_training` and all that it imports or names, directly or not, without those of `config`."""
    links = _imports_of(modules, named=True)
    starts = [module.path for module in modules
              if any(isinstance(node, FUNCTION) and node.name == "run_training" for node in module.tree.body)]
    reached = {path: None for start in starts for path in (start, *_reached_from(start, links))}
    by_path = {module.path: module for module in modules}
    return [by_path[path] for path in reached if not path.startswith("config/")]


def _imports_of(modules: Modules, *, named: bool = False) -> dict[str, list[str]]:
    """Return the modules that each one imports and, if asked for, names in strings, by paths such as "runs/run.py"."""
    paths = {_dotted(module): module.path for module in modules}
    found = {}
    for module in modules:
        names = list(module.imported.values())
        if named:
            texts = [each.value for each, _ in module.nodes[ast.Constant] if isinstance(each.value, str)]
            names += [each.partition(":")[0] for each in texts if _MODULE.match(each)]
        dotted = [each.partition(".")[2] for each in names]
        found[module.path] = [paths[each] for each in (*dotted, *(each.rpartition(".")[0] for each in dotted)) if each in paths]
    return found


def _reached_from(start: str, links: Mapping[str, Sequence[str]]) -> dict[str, None]:
    """Return what a path leads to, directly or not, in the order found; itself only by a circle."""
    reached: dict[str, None] = {}
    ahead = [*links[start]]
    while ahead:
        path = ahead.pop()
        if path not in reached:
            reached[path] = None
            ahead += links[path]
    return reached


def _dotted(module: Module, name: str = "") -> str:
    """Return a module's name within the package, such as "runs.run", or that of something in it."""
    dotted = module.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"{dotted}.{name}" if name else dotted


def _floors() -> dict[str, int]:
    """Return the place of each folder in the layers of `pyproject.toml`, e.g. {"cli": 0, "api": 1}; the highest layer has 0."""
    [layers] = [each["layers"] for each in tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
                if each["type"] == "layers"]
    return {name.strip(): floor for floor, names in enumerate(layers) for name in names.split("|")}


def _floor_of(path: str, floors: Mapping[str, int]) -> int:
    return floors.get(path.partition("/")[0].removesuffix(".py"), len(floors))
