"""A table of what src/offbeat uses of torch, transformers, vLLM and Ray that these may change, and whether it holds in an environment.

It reads the source alone, so any Python that has the packages can run it. Names imported from these packages must be there; an operator of
`torch.ops`, a name with an underscore before it, and what comes from inside transformers, vLLM, Ray or a private module of torch must take
the arguments that it is called with: not too many, none that it does not know, all that it needs. A starred argument may be empty.

    python tools/operator_schemas.py [--source FOLDER] [--packages torch transformers ray vllm] [--json]

Packages that are not installed are left out, and named. Exit 1 where something does not hold.
"""

import argparse
import ast
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src" / "offbeat"
PACKAGES = ("torch", "transformers", "ray", "vllm")


@dataclass(frozen=True)
class Use:
    """A use of a name.

    Attributes:
        name: whole, such as "torch.ops.torch_attn._varlen_attn".
        place: file and line, such as "model/varlen.py:200".
        positional: number of positional arguments of a call; None where it is not called there.
        keywords: names of its other arguments.
        more: whether starred arguments follow, which may be empty.
    """

    name: str
    place: str
    positional: int | None = None
    keywords: tuple[str, ...] = ()
    more: bool = False

    @property
    def arguments(self) -> str:
        """What it is called with, in words."""
        if self.positional is None:
            return "not called"
        counted = f"{self.positional} by position{', or more' if self.more else ''}"
        return ", ".join([counted, *(f"{name}=" for name in self.keywords)])


def uses(text: str, place: str) -> Iterator[Use]:
    """Yield what a module uses of the packages and may change."""
    tree = ast.parse(text)
    known = {alias.asname or alias.name.partition(".")[0]: alias.name if alias.asname else alias.name.partition(".")[0]
             for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in PACKAGES:
            for alias in node.names:
                known[alias.asname or alias.name] = name = f"{node.module}.{alias.name}"
                if _may_change(name):
                    yield Use(name, f"{place}:{node.lineno}")
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            whole = _whole(node.value, known)  # ops = torch.ops.torch_attn
            if whole and whole.startswith("torch.ops."):
                known[node.targets[0].id] = whole
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name | ast.Attribute) or id(node) in inner or not isinstance(node.ctx, ast.Load):
            continue
        whole = _whole(node, known)
        if not whole or not _may_change(whole):
            continue
        if call := called.get(id(node)):
            starred = [argument for argument in call.args if isinstance(argument, ast.Starred)]
            yield Use(
                whole, f"{place}:{node.lineno}", len(call.args) - len(starred), tuple(k.arg for k in call.keywords if k.arg),
                bool(starred) or any(k.arg is None for k in call.keywords))
        elif isinstance(node, ast.Attribute):
            yield Use(whole, f"{place}:{node.lineno}")


def _whole(node: ast.AST, known: dict[str, str]) -> str | None:
    """Return the whole name of an expression, if it is one of a package."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _whole(node.value, known)
        return f"{base}.{node.attr}" if base else None
    return None


def _may_change(name: str) -> bool:
    package, *parts = name.split(".")
    if package == "torch":
        return parts[:1] == ["ops"] or any(part.startswith("_") and not part.endswith("__") for part in parts)
    # What a package shows at its top is stable, and so are the methods of a class that it shows there.
    return package in PACKAGES and len(parts) > 1 and not parts[0][0].isupper()


def fault_of(use: Use) -> str | None:
    """Return what is wrong with a use in this environment; None if it holds."""
    try:
        found = resolve(use.name)
    except (ImportError, AttributeError) as exc:
        return f"is not there: {exc}"
    if use.positional is None:
        return None
    schemas = _schemas(found)
    if schemas is not None:
        faults = [_schema_fault(schema, use) for schema in schemas]
        return None if None in faults else faults[0]
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return None  # made in C, with no signature to read
    bind = signature.bind_partial if use.more else signature.bind
    try:
        bind(*range(use.positional), **dict.fromkeys(use.keywords))
    except TypeError as exc:
        return str(exc)
    return None


def resolve(name: str) -> Any:
    """Return what has this name; modules on the way are imported."""
    parts = name.split(".")
    if parts[:3] == ["torch", "ops", "torch_attn"]:
        import_module("torch.nn.attention.varlen")  # registers them
    # The longest module first: `ray.util.placement_group` is a module, and a function of `ray.util`.
    for length in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:length]))
        except ModuleNotFoundError as exc:
            if exc.name is None or not name.startswith(exc.name):
                raise  # a module that is there lacks another one
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(f"No module named {parts[0]!r}")


def _schemas(found: Any) -> list[Any] | None:
    """Return the schemas of an operator of torch; None of anything else."""
    if hasattr(found, "_schema"):
        return [found._schema]
    if type(found).__name__ == "OpOverloadPacket":
        return [getattr(found, overload)._schema for overload in found.overloads()]
    return None


def _schema_fault(schema: Any, use: Use) -> str | None:
    ordered = [argument for argument in schema.arguments if not argument.kwarg_only]
    given = use.positional or 0
    if given > len(ordered):
        return f"takes at most {len(ordered)} arguments by position, not {given}"
    if unknown := set(use.keywords) - {argument.name for argument in schema.arguments}:
        return f"knows no argument {min(unknown)}"
    rest = ordered[given:] + [argument for argument in schema.arguments if argument.kwarg_only]
    missing = [a.name for a in rest if not a.has_default_value() and a.name not in use.keywords]
    return f"needs {missing[0]}" if missing and not use.more else None


def check(source: Path, packages: list[str]) -> tuple[list[tuple[Use, str | None]], dict[str, str | None]]:
    """Return each use with its fault, and the versions of the packages; None is not installed."""
    versions = {name: _version(name) for name in packages}
    found = []
    for path in sorted(source.rglob("*.py")):
        for use in uses(path.read_text(), str(path.relative_to(source))):
            if versions.get(use.name.partition(".")[0]):
                found.append((use, fault_of(use)))
    return found, versions


def _version(name: str) -> str | None:
    if not find_spec(name):
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return str(getattr(import_module(name), "__version__", "of unknown version"))


def main() -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=SOURCE)
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES), choices=PACKAGES)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found, versions = check(args.source, args.packages)
    faults = [(use, fault) for use, fault in found if fault]
    if args.json:
        print(json.dumps({"versions": versions, "uses": len(found), "faults": [asdict(use) | {"fault": fault} for use, fault in faults]}))
        return int(bool(faults))
    for use, fault in found:
        print(f"{use.place:42} {use.name:75} {use.arguments:30} {fault or 'holds'}")
    print(f"{len(found)} uses, {len(faults)} of which do not hold, in", ", ".join(
        f"{name} {version}" if version else f"no {name}" for name, version in versions.items()))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
