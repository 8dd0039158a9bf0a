"""Compares a checkpoint's settings with the current ones when a run is resumed.

The controller does so before it starts anything. Each setting's field gives the meaning of a change, and the parts of a run that read it
(`config.base`). Data, models and user code are compared by their contents (`data.identity`), because a path says little about them.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.config.base import Change, Part, declared, value_at
from offbeat.config.dump import toml_value
from offbeat.config.root import Config
from offbeat.config.toml_file import read_toml

_SETTINGS = {setting.key: setting for setting in declared(Config)}

CHANGES: dict[str, Change] = {key: setting.on_resume for key, setting in _SETTINGS.items() if setting.on_resume is not None}
"""Meaning of a change of each setting, by "section.key"."""

_MOST_SHOWN = 200
"""Characters of a value in messages; a chat template has thousands."""


@dataclass(frozen=True)
class Changed:
    """A setting whose value has changed, as text for example "train.optimizer.lr = 2e-05, was 1e-05"."""

    key: str
    now: Any
    was: Any

    def __str__(self) -> str:
        return f"{self.key} = {_shortened(toml_value(self.now))}, was {_shortened(toml_value(self.was))}"


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}… ({len(text)} characters)"


def remembered(config: Config) -> dict[str, Any]:
    """Return a checkpoint's settings by "section.key": all but those that may change freely, among which are secrets."""
    values = config.model_dump(mode="json")
    return {key: value_at(values, key) for key, change in CHANGES.items() if change is not Change.FREE}


def remembered_in(file: Path) -> dict[str, Any]:
    """Return those settings of `remembered` that a run's own `config.toml` holds, whichever version wrote it; {} without the file.

    Raises ConfigError if the file cannot be read as TOML.
    """
    if not file.exists():
        return {}
    values, found = read_toml(file), {}
    for key, change in CHANGES.items():
        with suppress(KeyError, AttributeError):  # another version's file lacks some, or has a value in place of a table
            if change is not Change.FREE:
                found[key] = value_at(values, key)
    return found


def changes(now: Mapping[str, Any], was: Mapping[str, Any], *, part: Part) -> dict[Change, list[Changed]]:
    """Return the differences from `remembered` settings, by their meaning, as far as this part of a run reads them.

    A setting that is missing on either side, because another version of Offbeat wrote it, does not count as different.
    """
    found: dict[Change, list[Changed]] = {change: [] for change in Change}
    for key, change in CHANGES.items():
        if key in now and key in was and now[key] != was[key] and _SETTINGS[key].is_read_by(part):
            found[change].append(Changed(key, now[key], was[key]))
    return found


def listed(changed: Iterable[Changed]) -> str:
    """Format changed settings in one line."""
    return "; ".join(map(str, changed))
