"""From the arguments of a public function to a configuration: the same that a command would load from a file and `--section.key value`.

Settings come from four places, the later ones winning: the defaults, `config`, `settings` and keywords, and the arguments that have names
of their own, such as `model`. A function given as a setting, wherever it is, is kept as an object (`user_code.given`) and named.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from offbeat.api.rows import FOLDER, Rows, RowsFile, is_named, write_rows
from offbeat.config.base import Setting, declared
from offbeat.config.data import DataConfig
from offbeat.config.evaluation_sets import setting_of
from offbeat.config.load import ALIASES, load_config, near_settings, suggestion
from offbeat.config.load import settings as all_settings
from offbeat.config.root import TRAINING_KINDS, Config
from offbeat.data.files import named
from offbeat.errors import CodeError, ConfigError, shorten
from offbeat.user_code.given import give, import_name, withdraw

Settings = Mapping[str, Any]
"""Settings by "section.key", such as {"train.optimizer.lr": 1e-5}, or sections as mappings."""

Source = str | os.PathLike[str] | Settings
"""A configuration file, or sections as in `Run.config`."""

_NOT_YET = "(rows)"
_MOST_NAMED = 6

_LESSONS = {kind.section: kind for kind in TRAINING_KINDS.values() if kind.lesson}
_OWN_SECTIONS = {section: kind.function for section, kind in _LESSONS.items()} | {"serve": "service"}
"""Sections that one kind of call reads, by the function that does."""


@contextmanager
def configured(
    config: Source | None, settings: Settings | None, keywords: Settings, *, homes: Sequence[str], given: Settings,
    rows: Mapping[str, Rows | None],
) -> Iterator[Config]:
    """Yield the configuration; the functions in it are known as long as the body runs.

    Args:
        homes: sections in which a keyword is looked for first, in this order.
        given: settings of arguments with names of their own, by "section.key"; None was not given.
        rows: data by the section that gets its path, such as "data" or "evaluate.sets.hard.data", or the setting "data.heldout_path".

    Raises:
        ConfigError: a setting is unknown, or its value is not allowed.
        CodeError: a function cannot be sent to the process that calls it.
        DataError: rows cannot be used.
    """
    values = dict(_flat(_base(config)))
    values.update(_flat(settings or {}))
    chosen = _by_setting(keywords, homes)
    if twice := next((key for key, value in given.items() if value is not None and key in chosen), None):
        raise ConfigError(f"{twice} is given twice, by an argument of its own and by a keyword; give one of them")
    values.update(_flat(chosen))
    values.update({key: os.fspath(value) if isinstance(value, os.PathLike) else value for key, value in given.items() if value is not None})
    _check_tables(values)
    _check_models(values)
    names: list[str] = []
    try:
        values = {key: _named(value, key, names) for key, value in values.items()}
        path = None if config is None or isinstance(config, Mapping) else os.fspath(config)
        for key, data in rows.items():
            if data is not None:
                values.update(settings_of_data(key, data))
        loaded = load_config(path, values=values)
        in_memory: dict[str, Any] = {key: data for key, data in rows.items() if data is not None and not is_named(data)}
        files: dict[int, RowsFile] = {}
        called: dict[str, str] = {}
        for key, data in in_memory.items():  # a generator that is given twice is read once
            argument = _argument(key)
            file = files[id(data)] = files.get(id(data)) or write_rows(data, Path(loaded.run.dir) / FOLDER, argument=argument)
            called.setdefault(str(file.path), argument)
            values.update(_layout(key, file, values))
        with named(called):
            yield load_config(path, values=values) if in_memory else loaded
    finally:
        withdraw(names)


def _base(config: Source | None) -> dict[str, Any]:
    if config is None or isinstance(config, str | os.PathLike):
        return {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"config must be a TOML file or a mapping of settings, got {type(config).__name__}")
    return dict(config)


def _flat(values: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by their whole names, so that a section which gives one setting leaves its others as they are."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and setting_of(key) not in _tables():
            yield from _flat(value, f"{key}.")
        else:
            yield ALIASES.get(key, key), value


@cache
def _tables() -> frozenset[str]:
    """Return the settings that are tables as a whole, such as the weights of rewards, whose names have dots."""
    return frozenset(key for key, _ in all_settings()) - {"data.sets", "evaluate.sets"}


def _by_setting(keywords: Settings, homes: Sequence[str]) -> dict[str, Any]:
    """Return keywords by the settings that they mean; raises ConfigError if one means no setting or several, or two mean the same."""
    found: dict[str, str] = {}
    for name in keywords:
        key = _setting(name, homes)
        if key in found:
            raise ConfigError(f"{found[key]} and {name} are two names of one setting, {key}; give one of them")
        found[key] = name
    return {key: keywords[name] for key, name in found.items()}


def _setting(name: str, homes: Sequence[str]) -> str:
    """Return the setting that a keyword means: "section.key" itself, a section, or the last part of a setting's name or alias.

    Raises:
        ConfigError: no setting has this name, several have, or only one that this call does not read.
    """
    if "." in name or name in Config.model_fields:
        return ALIASES.get(name, name)
    name = next((key.rpartition(".")[2] for alias, key in ALIASES.items() if alias.rpartition(".")[2] == name), name)
    found = [key for key, _ in all_settings() if key.rpartition(".")[2] == name]
    for home in homes:
        if f"{home}.{name}" in found:
            return f"{home}.{name}"
    if found and all(map(partial(_is_of_others, homes=homes), found)):
        readers = " or ".join(f"{key} of offbeat.{_OWN_SECTIONS[key.partition('.')[0]]}" for key in found)
        own = {home.partition(".")[0] for home in homes}
        near = [key for key in _near(name, homes) if key.partition(".")[0] in own]
        raise ConfigError(f"{name} is {readers}, which this call does not read; {_advice(near, homes)}")
    if len(found) > 1:
        raise ConfigError(
            f"{name} may be {' or '.join(found[:_MOST_NAMED])}; give it by its whole name, as in settings={{{found[0]!r}: ...}}")
    if not found:
        raise ConfigError(f"{name} is not a setting; {_advice(_near(name, homes), homes)}")
    return found[0]


def _near(name: str, homes: Sequence[str]) -> list[str]:
    """Return the settings that a keyword may mean, those in `homes` first; settings that no call with these homes reads are left out."""
    known = {key for key, _ in all_settings()}
    near: list[str] = []
    for key in near_settings(name):
        at_home = [own for home in homes if (own := f"{home}.{key.rpartition('.')[2]}") in known][:1]
        near += [own for own in at_home or [key] if own not in near and not _is_of_others(own, homes=homes)]
    return near


def _is_of_others(key: str, *, homes: Sequence[str]) -> bool:
    """Whether no call with these homes reads a setting."""
    section = key.partition(".")[0]
    if section not in _OWN_SECTIONS or section in homes:
        return False
    if section not in _LESSONS:
        return True
    parts = [kind.part for home, kind in _LESSONS.items() if home in homes]
    parts += [TRAINING_KINDS["sft"].part] if "algorithm" in homes else []  # `train` has a warm-up
    return not any(_declared()[key].is_read_by(part) for part in parts)


@cache
def _declared() -> Mapping[str, Setting]:
    return {setting.key: setting for setting in declared(Config)}


def _advice(near: Sequence[str], homes: Sequence[str]) -> str:
    """Suggest settings, and show how the first is given in Python, where a name with dots is no keyword."""
    if not near:
        return "'offbeat config docs' lists them all"
    key, name = near[0], near[0].rpartition(".")[2]
    try:
        is_keyword = _setting(name, homes) == key
    except ConfigError:  # several settings have this name
        is_keyword = False
    return f"{suggestion(near[:_MOST_NAMED])} Give it as {f'{name}=...' if is_keyword else f'settings={{{key!r}: ...}}'}"


def _check_tables(values: Settings) -> None:
    """Raise ConfigError if something else is given where a mapping has to be, in words of Python and not of TOML."""
    sections = {key[:at] for key, _ in all_settings() for at, letter in enumerate(key) if letter == "."}
    tables = {key for key, info in all_settings() if get_origin(info.annotation) is dict}
    for key, value in values.items():
        if isinstance(value, Mapping) or (setting_of(key) == "rollout.rewards" and isinstance(value, list | tuple)):
            continue
        if key == "rollout.rewards":
            raise ConfigError(
                f"rewards takes several rewards with their weights, as in rewards={{mine: 1.0, 'exact_match': 0.5}}, got {shorten(value)};"
                " did you mean reward=, which takes one?")
        if key in sections | tables:
            raise ConfigError(f"{key} takes settings by name, as a mapping, got {shorten(value)}")


def _check_models(values: Settings) -> None:
    """Raise ConfigError if a model is given as an object: a run loads models in processes of its own, from a folder or the hub."""
    for key, value in values.items():
        setting = setting_of(key)
        for each in value if isinstance(value, list | tuple | Mapping) else [value]:
            kinds = {kind.__name__ for kind in type(each).__mro__}
            if not kinds & {"Module", "Pipeline", "PreTrainedTokenizerBase", "PushToHubMixin"} or isinstance(each, type):
                continue
            what = f"{setting.rpartition('.')[2] if setting.startswith('rollout.') else setting} got a {type(each).__name__} as an object"
            if setting in ("rollout.reward", "rollout.rewards"):
                raise ConfigError(
                    f"{what}, and rewards are computed in processes of their own; save the reward model and its tokenizer with"
                    " save_pretrained('judge') and give reward='model:judge', or a function that loads what it needs")
            peft = " merge a PEFT adapter with merge_and_unload() first;" if "PeftModel" in kinds else ""
            raise ConfigError(
                f"{what}, and a run loads its models itself;{peft} save it and its tokenizer with save_pretrained('folder') and give that"
                " folder")


def _named(value: Any, key: str, names: list[str]) -> Any:
    """Return a setting with the names of functions in their place; adds those names that must be withdrawn."""
    if isinstance(value, list | tuple):
        return [_named(item, key, names) for item in value]
    if isinstance(value, Mapping):  # rewards with their weights
        return {_named(name, key, names): _named(item, key, names) for name, item in value.items()}
    if not callable(value):
        return value
    if key == "algorithm.objective":
        if not (name := import_name(value)):
            raise CodeError(
                "algorithm.objective: an objective is called in the train ranks, which import it, so it must be in a file of its own;"
                " move it there and give it as objective = 'losses.py:mine'")
        return name
    name = give(value, kind=key)
    names.append(name)
    return name


def settings_of_data(key: str, data: Rows) -> dict[str, Any]:
    """Return the settings below `key` for the source of data: a path, a task, or a placeholder for rows in memory."""
    text = os.fspath(data) if isinstance(data, str | os.PathLike) else _NOT_YET
    if key.endswith("_path"):
        return {key: text}
    task = is_task(data)
    return {f"{key}.task": text if task else "", f"{key}.path": "" if task else text}


def is_task(data: Rows) -> bool:
    """Whether data is text that names a built-in task, and no file."""
    if not isinstance(data, str):
        return False
    try:
        return bool(DataConfig(task=data).task) and not Path(data).exists()
    except ValidationError:
        return False


def _argument(key: str) -> str:
    """Return the argument that gave the rows of a section or setting."""
    return {"data": "data", "data.heldout_path": "evaluate"}.get(key) or f"evaluate[{key.split('.')[2]!r}]"


def _layout(key: str, file: RowsFile, values: Settings) -> dict[str, Any]:
    """Return the settings for the path and the format of rows in memory, as far as `values` do not have them."""
    path = str(file.path)
    if key.endswith("_path"):
        return {key: path}
    found = {f"{key}.path": path}
    if "messages" in file.fields and "prompt" not in file.fields and f"{key}.format" not in values:
        found[f"{key}.format"] = "messages"
    return found
