"""Counts twins of names, parameters, prose and sizes in the sources of a package, for the table of `structure.py`.

It reads text and imports nothing of the package, so it works in a broken checkout. Each public function takes the parsed modules and gives
a figure with its cases; its docstring says exactly which cases count.
"""

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

TRAININGS = frozenset({"sft", "dpo", "reward-model"})
"""Kinds of training, as `offbeat` has them as commands; reinforcement learning is "train"."""

_TABLES = {"config/objectives.py": "OBJECTIVES", "config/engine_kinds.py": "ENGINE_KINDS"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?"""|' r"'''(?:\\.|[^\\])*?'''|" r'"(?:\\.|[^"\\\n])*"|' r"'(?:\\.|[^'\\\n])*'|" r"#[ ]*([^\n]*)", re.DOTALL)
_WHAT = re.compile(r"\bwhat\b", re.IGNORECASE)
_EXAMPLE = re.compile(
    r"\bfor example\b|\bsuch as\b|\be\.g\.|"
    r"^[ ]*>>>.*(?:\n[ ]*\S.*)*|"  # a run of lines in an interpreter
    r":\n\n[ ]{2,}\S",  # an indented block after a colon and an empty line
    re.IGNORECASE | re.MULTILINE)
_SHAPE = re.compile(r"\[(?:\d+, |\.\.\., )*[A-Z][A-Za-z0-9_]{0,8}(?:[]+*/ -]|, )")
_SHAPED_NAME = re.compile(r"[a-z0-9]_[A-Z]{2,4}\b")


class Spot(NamedTuple):
    """One case of a measure: a name that stays while lines move, such as "aio.py SideThread.run", and its places, as "file:line"."""

    name: str
    where: str


class Found(NamedTuple):
    """A figure, and the cases that make it worse."""

    figure: float
    spots: Sequence[Spot]


class Text(NamedTuple):
    """A docstring or a comment, and the line where it begins."""

    line: int
    words: str


class Node(NamedTuple):
    """A node of a module with the dotted name of the class or function that it is in; that of a class or function ends in its own."""

    node: Any
    name: str


@dataclass(frozen=True)
class Module:
    """One file, parsed. Its path is relative to the package, such as "trainer/worker.py"."""

    path: str
    source: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> dict[type, list[Node]]:
        """Nodes by type."""
        found: dict[type, list[Node]] = defaultdict(list)
        stack: list[tuple[ast.AST, str]] = [(self.tree, "")]
        while stack:
            node, name = stack.pop()
            if isinstance(node, (*FUNCTION, ast.ClassDef)):
                name = f"{name}.{node.name}" if name else node.name
            found[type(node)].append(Node(node, name))
            for field in node._fields:
                value = getattr(node, field)
                for each in reversed(value) if isinstance(value, list) else (value,):
                    if isinstance(each, ast.AST) and not isinstance(each, ast.expr_context):
                        stack.append((each, name))
        return found

    @property
    def functions(self) -> Iterator[Node]:
        """Functions and methods, nested ones too."""
        for kind in FUNCTION:
            yield from self.nodes[kind]

    @cached_property
    def texts(self) -> list[Text]:
        """Docstrings, those below an assignment too, and comments."""
        strings = [Text(each.lineno, inspect.cleandoc(each.value.value)) for each, _ in self.nodes[ast.Expr]
                   if isinstance(each.value, ast.Constant) and isinstance(each.value.value, str)]
        matches = _STRING_OR_COMMENT.finditer(self.source) if "#" in self.source else ()
        return strings + [Text(self.source.count("\n", 0, each.start()) + 1, each[1]) for each in matches if each[1]]

    @property
    def imported(self) -> dict[str, str]:
        """Dotted names, such as "offbeat.config.root.Config", by the names that they have here."""
        return {
            alias.asname or alias.name: f"{each.module}.{alias.name}" for each, _ in self.nodes[ast.ImportFrom] for alias in each.names}

    def spot(self, node: Any, name: str) -> Spot:
        """Return a case at a node."""
        return Spot(f"{self.path} {name}".rstrip(), f"{self.path}:{node.lineno}")


Modules = Sequence[Module]


def read_modules(folder: Path) -> list[Module]:
    """Parse all files of a package."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        found.append(Module(path.relative_to(folder).as_posix(), source, ast.parse(source)))
    return found


def class_twins(modules: Modules) -> Found:
    """Names of classes, nested ones too, that are defined in two modules or more."""
    return _repeated(((node.name, module, node.lineno) for module in modules for node, _ in module.nodes[ast.ClassDef]), least=2)


def function_twins(modules: Modules) -> Found:
    """Names of functions and methods together, private ones too, that are defined in 8 files or more; not `__init__` and its like."""
    return _repeated((
        (node.name, module, node.lineno) for module in modules for node, _ in module.functions if not node.name.startswith("__")), least=8)


def file_twins(modules: Modules) -> Found:
    """Names of files that occur twice or more; not `__init__.py` and `__main__.py`, whose names are Python's."""
    names = ((module.path.rpartition("/")[2], module, 1) for module in modules)
    return _repeated((each for each in names if not each[0].startswith("__")), least=2)


def _repeated(defined: Iterable[tuple[str, Module, int]], *, least: int) -> Found:
    places: dict[str, dict[str, str]] = defaultdict(dict)
    for name, module, line in defined:
        places[name].setdefault(module.path, f"{module.path}:{line}")
    spots = [Spot(name, ", ".join(where.values())) for name, where in places.items() if len(where) >= least]
    return Found(len(spots), spots)


def callables(modules: Modules) -> Found:
    """Parameters of functions, and fields of dataclasses, whose annotation has `Callable` written out; a named type, as `Say`, does not."""
    spots = [spot for module in modules for _, taken in _takers(module) for spot in taken]
    return Found(len(spots), spots)


def callables_of_constructor(modules: Modules) -> Found:
    """The largest number of them that one `__init__` or one dataclass takes."""
    counted = [(len(taken), owner) for module in modules for owner, taken in _takers(module) if owner.name.endswith(".__init__")]
    most = max((number for number, _ in counted), default=0)
    return Found(most, [owner for number, owner in counted if number == most > 0])


def _takers(module: Module) -> Iterator[tuple[Spot, list[Spot]]]:
    """Yield each function, and each dataclass as its `__init__`, with the parameters that are callables."""
    for node, name in module.functions:
        taken = [each for each in parameters(node) if each.annotation is not None and "Callable" in names_in(each.annotation)]
        yield module.spot(node, name), [module.spot(each, f"{name}.{each.arg}") for each in taken]
    for node, name in module.nodes[ast.ClassDef]:
        if any("dataclass" in names_in(each) for each in node.decorator_list):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and "Callable" in names_in(each.annotation)]
            yield module.spot(node, f"{name}.__init__"), [module.spot(each, f"{name}.{last_name(each.target)}") for each in fields]


def many_parameters(modules: Modules) -> Found:
    """Functions with more than 7 parameters, without `self`, `cls`, `*args` and `**kwargs`."""
    spots = [module.spot(node, name) for module in modules for node, name in module.functions if len(list(parameters(node))) > 7]
    return Found(len(spots), spots)


def parameters(function: Any) -> Iterator[ast.arg]:
    """Yield the parameters of a function or method, without `self`, `cls`, `*args` and `**kwargs`."""
    given = function.args
    yield from [each for each in (*given.posonlyargs, *given.args, *given.kwonlyargs) if each.arg not in ("self", "cls")]


def name_tests(modules: Modules) -> Found:
    """Tests of a variable or an attribute against the name of an objective, a kind of engine or a kind of training, outside their tables.

    That is `x == "ppo"`, `x != "ppo"`, `x in ("ppo", ...)` and `case "ppo"`, but not `"ppo" in f()`. The names are the keys of `OBJECTIVES`
    in `config/objectives.py` and of `ENGINE_KINDS` in `config/engine_kinds.py`, and `TRAININGS`.
    """
    names = names_of_tables(modules)
    spots = []
    for module in modules:
        if module.path not in _TABLES:
            tests = [each for each in module.nodes[ast.Compare] if _words_compared(each.node) & names]
            tests += [each for each in module.nodes[ast.MatchValue] if {_word(each.node.value)} & names]
            spots += [module.spot(node, f"{name} {ast.unparse(node)}") for node, name in tests]
    return Found(len(spots), spots)


def names_of_tables(modules: Modules) -> set[str]:
    """Return the names of all objectives, kinds of engines and kinds of training."""
    return set(TRAININGS).union(*(_keys_of(module, _TABLES[module.path]) for module in modules if module.path in _TABLES))


def _keys_of(module: Module, table: str) -> Iterator[str]:
    """Yield the outer keys of a dictionary that a module defines."""
    for node, _ in module.nodes[ast.AnnAssign] + [Node(each, name) for each, name in module.nodes[ast.Assign]]:
        if last_name(node.target if isinstance(node, ast.AnnAssign) else node.targets[0]) == table:
            tables = [node.value, *(node.value.args if isinstance(node.value, ast.Call) else ())]
            yield from (_word(key) for each in tables if isinstance(each, ast.Dict) for key in each.keys if key is not None)


def _words_compared(node: ast.Compare) -> set[str]:
    sides = [node.left, *node.comparators]
    if not any(isinstance(each, ast.Name | ast.Attribute) for each in sides):
        return set()
    return {_word(each) for side in sides for each in (side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else (side,))}


def _word(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def broad_handlers(modules: Modules) -> Found:
    """Share, in percent, of all `except` that catch everything and do not end in raising the same error again.

    Everything is nothing named, `Exception` or `BaseException`. Another error raised instead, a value returned or a line logged all count.
    """
    handlers = [(module, node, name) for module in modules for node, name in module.nodes[ast.ExceptHandler]]
    spots = [module.spot(node, name) for module, node, name in handlers if _is_broad(node) and not _raises_again(node)]
    return Found(100 * len(spots) / max(len(handlers), 1), spots)


def _is_broad(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or not names_in(handler.type).isdisjoint({"Exception", "BaseException"})


def _raises_again(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and (last.exc is None or last_name(last.exc) == handler.name)


def shapes(modules: Modules) -> Found:
    """Share, in percent, of the docstrings of functions that take or give arrays which say a shape.

    These functions have `Tensor`, `NDArray` or `ndarray` in an annotation. A shape begins with a bracket and a capital letter or a number,
    such as "[N, K]" or "2 x [M]"; a name may say it too, also that of a parameter, such as `logits_TV`.
    """
    kinds = {"Tensor", "NDArray", "ndarray"}
    asked, spots = 0, []
    for module in modules:
        for node, name in module.functions:
            text = ast.get_docstring(node)
            annotations = [each for each in (*(each.annotation for each in parameters(node)), node.returns) if each is not None]
            if text is None or not any(names_in(each) & kinds for each in annotations):
                continue
            asked += 1
            if not _SHAPE.search(text) and not any(_SHAPED_NAME.search(each) for each in (text, *(each.arg for each in parameters(node)))):
                spots.append(module.spot(node, name))
    return Found(100 * (asked - len(spots)) / max(asked, 1), spots)


def whats(modules: Modules) -> Found:
    """How often the word "what" stands in 1,000 words of docstrings and comments."""
    spots = [
        Spot(module.path, f"{module.path}:{text.line + text.words.count(chr(10), 0, each.start())}")
        for module in modules for text in module.texts for each in _WHAT.finditer(text.words)]
    return Found(_per_thousand(len(spots), modules), spots)


def examples(modules: Modules) -> Found:
    """Examples in 1,000 words of docstrings and comments; the cases are the modules without any, longest prose first.

    An example is "for example", "such as" or "e.g.", a run of lines after `>>>`, or an indented block after a colon and an empty line.
    """
    numbers = {module: sum(len(_EXAMPLE.findall(text.words)) for text in module.texts) for module in modules}
    without = sorted((module for module, number in numbers.items() if not number), key=lambda module: -_num_words([module]))
    return Found(_per_thousand(sum(numbers.values()), modules), [Spot(module.path, f"{module.path}:1") for module in without])


def _num_words(modules: Modules) -> int:
    return sum(len(re.findall(r"[A-Za-z']+", text.words)) for module in modules for text in module.texts)


def _per_thousand(number: int, modules: Modules) -> float:
    return 1000 * number / max(_num_words(modules), 1)


def source_lines(modules: Modules) -> Found:
    """Lines of all files, in thousands; the cases are the folders."""
    folders: dict[str, int] = defaultdict(int)
    for module in modules:
        folders[module.path.rpartition("/")[0] or "."] += module.source.count("\n")
    spots = [Spot(folder, f"{number} lines") for folder, number in sorted(folders.items(), key=lambda each: -each[1])]
    return Found(sum(folders.values()) / 1000, spots)


def long_functions(modules: Modules) -> Found:
    """Functions over 60 lines."""
    long = [module.spot(node, name) for module in modules for node, name in module.functions if node.end_lineno - node.lineno >= 60]
    return Found(len(long), long)


def long_files(modules: Modules) -> Found:
    """Files over 400 lines."""
    long = [Spot(module.path, f"{module.path}:1") for module in modules if module.source.count("\n") > 400]
    return Found(len(long), long)


def names_in(node: ast.AST) -> set[str]:
    """Return all names in an expression, those within strings too."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            found.update(re.findall(r"\w+", each.value))
        elif isinstance(each, ast.Name | ast.Attribute):
            found.add(last_name(each))
    return found


def last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name; "" for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
