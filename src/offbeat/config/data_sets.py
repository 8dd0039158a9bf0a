"""[data.sets.NAME]: data sets that are mixed by weight. Used by `config.root`, which makes a `Config` of each.

A set's own keys are `weight` and settings of [data]; its tables `rollout` and `agent` say how its rows are judged and played. It inherits
only `heldout_size`, `max_prompt_tokens` and `shuffle` of the run's [data], and all settings of other sections that it does not give.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from offbeat.config.agent import AgentConfig
from offbeat.config.data import DataConfig

_OF_RUN = ("shuffle", "max_prompt_tokens", "sets")
"""Settings of [data] that are about all sets."""
_SHARED = (*_OF_RUN, "heldout_size")
_TABLES: dict[str, tuple[str, ...]] = {
    "rollout": ("workflow", "reward", "rewards", "reward_workers", "reward_timeout_s", "reward_memory_bytes", "reward_env"),
    "agent": tuple(AgentConfig.model_fields),
}
_KEYS = ("weight", *(name for name in DataConfig.model_fields if name not in _OF_RUN), *_TABLES)
_PLAYED = ("program", "command", "environment", "tools")
_OF_SET = re.compile(r"data\.sets\.[^.]+\.(.+)", re.DOTALL)


def setting_of_set(key: str) -> str:
    """Return the setting that a key of a set stands for, e.g. data.path for data.sets.NAME.path; any other key as it is."""
    match = _OF_SET.fullmatch(key)
    return key if match is None else match[1] if "." in match[1] else f"data.{match[1]}"


def weight_of(name: str, table: Mapping[str, Any]) -> float:
    """Return a set's weight, 1 if it gives none; raises ValueError if it is no number above 0."""
    weight = table.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise ValueError(f"data.sets.{name}.weight must be a number above 0, got {weight!r}; leave the set out to draw nothing of it")
    return float(weight)


def values_of_data_set(name: str, table: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a whole configuration for the rows of a set, from its table, such as {"path": "sums.jsonl", "weight": 2}.

    Raises ValueError if the name is not allowed, or the table holds something that no set has.
    """
    if re.fullmatch(r"[a-z0-9_]+", name) is None:
        raise ValueError(f"data.sets must have names of lower case letters, digits and '_', got {name!r}")
    weight_of(name, table)
    for key in table:
        if key not in _KEYS:
            raise ValueError(_unknown(name, key))
    own = {section: _table(name, section, table) for section in _TABLES}
    data = {key: value for key, value in table.items() if key not in _TABLES and key != "weight"}
    replace_played(own, run)
    shared = {key: run["data"][key] for key in _SHARED if key != "sets"}
    return {
        **run, "data": {**shared, **data}, "rollout": {**run["rollout"], **own["rollout"]}, "agent": {**run["agent"], **own["agent"]},
        "curriculum": {}, "evaluate": {**run["evaluate"], "sets": {}, "keep_best": "", "stop_after_no_gain": 0}}


def replace_played(own: dict[str, dict[str, Any]], run: Mapping[str, Any]) -> None:
    """Empty the run's settings that contradict a set's, given by section: another reward, or another agent, tool or environment."""
    rollout, agent, workflow = own["rollout"], own["agent"], run["rollout"]["workflow"]
    for given, other, nothing in (("reward", "rewards", {}), ("rewards", "reward", "")):
        if rollout.get(given):
            rollout.setdefault(other, nothing)
    if rollout.get("workflow", workflow) != workflow or any(key in agent for key in _PLAYED):
        own["agent"] = {key: () if key in ("command", "tools") else "" for key in _PLAYED} | {"options": ()} | agent


def errors_in_set(section: str, name: str, exc: ValidationError) -> ValidationError:
    """Return the errors of a set's configuration with the keys of its table, such as [data.sets.sums]."""
    lines: list[Any] = []
    for error in exc.errors(include_url=False):
        loc = error["loc"][1:] if error["loc"][:1] == (section,) else error["loc"]
        lines.append({**error, "loc": (section, "sets", name, *loc)})
    return ValidationError.from_exception_data(exc.title, lines)


def check_sets(data: DataConfig) -> None:
    """Raise ValueError if [data] has a setting beside its sets that none of them would read, or a set names no rows."""
    default = DataConfig()
    for name in type(data).model_fields:
        if name not in _SHARED and (given := getattr(data, name)) != getattr(default, name):
            raise ValueError(f"data.{name} must be left out with data.sets, got {given!r}; give it in the tables of the sets it is for")
    for name, table in data.sets.items():
        if not (table.get("path") or table.get("task")):
            raise ValueError(f"data.sets.{name} must have a path or a task; it says which rows there are")


def _table(name: str, section: str, table: Mapping[str, Any]) -> dict[str, Any]:
    given = table.get(section, {})
    if not isinstance(given, Mapping):
        raise ValueError(f"data.sets.{name}.{section} must be a table of settings, got {given!r}; write [data.sets.{name}.{section}]")
    if wrong := next((key for key in given if key not in _TABLES[section]), None):
        raise ValueError(_unknown(name, f"{section}.{wrong}"))
    return dict(given)


def _unknown(name: str, key: str) -> str:
    known = [*_KEYS, *(f"{section}.{each}" for section, names in _TABLES.items() for each in names)]
    near = [each for each in known if each.rpartition(".")[2] == key.rpartition(".")[2]] or get_close_matches(key, known, n=1)
    advice = f"did you mean data.sets.{name}.{near[0]}?" if near else "it has a weight, settings of [data], and tables rollout and agent"
    return f"data.sets.{name}.{key} is not a setting of a data set; {advice}"
