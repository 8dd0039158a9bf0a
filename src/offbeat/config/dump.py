"""Writes a configuration, or one of its values, as TOML.

Called by the commands, for messages with values, and by the controller for a run's `config.toml`. `config.load` reads it back.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from offbeat.config.base import declared, value_at
from offbeat.config.root import Config

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dump_toml(config: Config, *, only_basic: bool = False) -> str:
    """Write all settings as TOML, which `load_config` turns back into an equal `Config`, or only those that a first run needs."""
    values = config.model_dump()
    chosen = _basic(values) if only_basic else values
    return "\n".join(_toml_tables(chosen, ())).lstrip("\n") + "\n"


def _basic(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables with the basic settings alone, such as {"run": {"name": "run", "total_steps": 100}}."""
    chosen: dict[str, Any] = {}
    for key in (setting.key for setting in declared(Config) if setting.basic):
        *tables, name = key.split(".")
        target = chosen
        for table in tables:
            target = target.setdefault(table, {})
        target[name] = value_at(values, key)
    return chosen


def _toml_tables(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    leaves = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    if leaves:
        yield f"\n[{'.'.join(map(_toml_key, path))}]"
        yield from (f"{_toml_key(name)} = {toml_value(value)}" for name, value in leaves.items())
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _toml_tables(value, (*path, name))


def _toml_key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else toml_value(name)


def toml_value(value: bool | int | float | str | Mapping[str, Any] | Sequence[Any]) -> str:
    """Format one value as TOML, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are also TOML's, except that JSON writes large code points as surrogate pairs and does not escape DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(name)} = {toml_value(item)}" for name, item in value.items()) + "}"
    return f"[{', '.join(toml_value(item) for item in value)}]"
