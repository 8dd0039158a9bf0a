"""Generates the reference of all settings from the descriptions of the fields.

`docs/configuration.md` is this text, and `offbeat config docs` prints it; a test keeps the file up to date.
"""

from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from offbeat.config.base import Section, declared
from offbeat.config.dump import toml_value
from offbeat.config.load import ALIASES
from offbeat.config.root import Config

_HEAD = """\
# Configuration

A run is described by a TOML file; every setting has a default, so a file holds only what differs. On the command line each is
`--section.key value`, which wins over the file. `offbeat config show FILE` prints what a file resolves to, `offbeat config check FILE` says
whether it is valid, and `offbeat config docs` prints this page, which is generated from the source. `offbeat docs NAME` prints other pages.

A first run needs few of them: those marked with ★, which `offbeat config show --basic` prints alone.

A relative path in the file is of the working directory, or, if nothing is there, of the file's own folder: `offbeat train
my-task/task.toml` finds the data and the reward that lie beside it. Paths on the command line, and `run.dir`, are of the working directory.
"""

_TYPES = {bool: "true or false", int: "integer", float: "number", str: "text"}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_BASIC = frozenset(setting.key for setting in declared(Config) if setting.basic)


def render_docs() -> str:
    """Render Markdown: for every section, a table of names, allowed values, defaults and meanings; of equal tables, only the first."""
    return "\n".join([_HEAD, *_tables(Config(), (), {})])


def _tables(section: Section, path: tuple[str, ...], printed: dict[type[Section], tuple[str, Section]]) -> Iterator[str]:
    """Yield a section's table and those in it; `printed` has the name and the content of each type's first table."""
    fields = type(section).model_fields
    leaves = {name: info for name, info in fields.items() if not isinstance(getattr(section, name), Section)}
    if leaves and type(section) in printed:
        yield f"{'#' * (len(path) + 1)} [{'.'.join(path)}]\n\n{_like(section, path, *printed[type(section)])}\n"
    elif leaves:
        printed[type(section)] = ".".join(path), section
        yield f"{'#' * (len(path) + 1)} [{'.'.join(path)}]\n\n{' '.join((type(section).__doc__ or '').split())}\n"
        yield "| setting | allowed | default | meaning |\n|---|---|---|---|"
        for name, info in leaves.items():
            key = ".".join((*path, name))
            aliases = [alias.rpartition(".")[2] for alias, real in ALIASES.items() if real == key]
            also = f" Also accepted as {' or '.join(map(_code, aliases))}." if aliases else ""
            shown = f"`{name}`{' ★' if key in _BASIC else ''} | {_allowed(info)} | {_code(toml_value(getattr(section, name)))}"
            yield f"| {shown} | {_cell(info.description or '')}{also} |"
        yield ""
    for name in fields:
        nested = getattr(section, name)
        if isinstance(nested, Section):
            yield from _tables(nested, (*path, name), printed)


def _like(section: Section, path: tuple[str, ...], first: str, values: Section) -> str:
    """Say that a table has the settings of an earlier one, which defaults differ, and which settings a first run needs."""
    own = [f"{name} = {toml_value(value)}" for name, value in section if value != getattr(values, name)]
    basic = [f"`{name}` ★" for name in type(section).model_fields if ".".join((*path, name)) in _BASIC]
    differs = f", with {' and '.join(map(_code, own))} by default" if own else ""
    needed = f"; of these {' and '.join(basic)} for a first run" if basic else ""
    return f"The settings of [{first}]{differs}{needed}."


def _allowed(info: FieldInfo) -> str:
    annotation: Any = info.annotation
    if get_origin(annotation) is tuple:
        return f"list of {_kind(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "table"
    bounds = [f"{sign} {getattr(rule, name)}" for rule in info.metadata for name, sign in _SIGNS.items() if hasattr(rule, name)]
    return " ".join([_kind(annotation), ", ".join(bounds)]).strip()


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(_code(toml_value(choice)) for choice in get_args(annotation))
    if annotation == (bool | str):
        return "true, false or text"
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(_kind, get_args(annotation)))
    return "tables" if issubclass(annotation, Section) else _TYPES[annotation]


def _code(text: str) -> str:
    return f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
