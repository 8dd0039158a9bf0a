"""Rows from reasoning-gym: more than a hundred families of generated puzzles, each with a verifier of its own.

`data.tasks` calls `open_reasoning` for `data.task = "reasoning_gym:NAME"`; the reward process calls `verify`. A row contains the family,
options and seed of its puzzle, so that the verifier sees the same puzzle in any process. Needs `offbeat[reasoning]`; imports no torch.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from offbeat.data.files import import_extra
from offbeat.data.row import Row
from offbeat.errors import DataError
from offbeat.user_code.boundary import Caught

PREFIX = "reasoning_gym:"
REWARD = "offbeat.rollout.rewards.reasoning:reasoning"

_PART = re.compile(r"([A-Za-z_]\w*)(?:\*(\d+(?:\.\d+)?))?")
_OPTION = re.compile(r"([A-Za-z_]\w*)\.([A-Za-z_]\w*)\s*=\s*(.+)", re.DOTALL)
_FIXED = {"seed": "run.seed seeds every row", "size": "rows never end"}


@dataclass(frozen=True)
class ReasoningFamily:
    """One family of puzzles, with its options, such as {"min_terms": 2}; `weight` is how often it is drawn, relative to the others."""

    name: str
    weight: float
    options: Mapping[str, Any]


@dataclass(frozen=True)
class ReasoningTask:
    """A mixture of families by weight. A row depends on (families, seed, stream, index) alone; see `data.tasks.Task`."""

    name: str
    families: tuple[ReasoningFamily, ...]
    reward: str = REWARD
    remedy: str = "widen its ranges in data.task_options"

    def row(self, index: int, *, seed: int, stream: str = "train") -> Row:
        digest = hashlib.sha256(f"{self.name}/{seed}/{stream}/{index}".encode()).digest()
        drawn = int.from_bytes(digest[:8], "big") / 2**64 * sum(family.weight for family in self.families)
        for family in self.families:
            drawn -= family.weight
            if drawn < 0:
                break
        puzzle = {"family": family.name, "options": json.dumps(dict(family.options)), "seed": str(int.from_bytes(digest[8:12], "big"))}
        entry = _entry(**puzzle)[1]
        return Row(entry["question"], str(entry["answer"] or ""), puzzle)


def open_reasoning(task: str, options: Sequence[str]) -> ReasoningTask:
    """Create the task that `data.task` and `data.task_options` describe.

    Args:
        task: "reasoning_gym:" and one or more NAME or NAME*WEIGHT, separated by commas.
        options: each "NAME.OPTION=VALUE", with the value as in TOML.

    Raises:
        DataError: the text has another form, the family or option does not exist, or a value is refused.
        MissingExtraError: reasoning-gym is not installed.
    """
    parts = [part.strip() for part in task.removeprefix(PREFIX).split(",")]
    matches = [_PART.fullmatch(part) for part in parts]
    if not all(matches):
        raise DataError(f"data.task must be {PREFIX}NAME, or several as {PREFIX}NAME*2,OTHER*1, got {task!r}")
    weights = {match[1]: float(match[2] or 1) for match in matches if match}
    if len(weights) < len(parts):
        raise DataError(f"data.task names a family twice, got {task!r}; give each once, with a weight as in NAME*2")
    if min(weights.values()) <= 0:
        raise DataError(f"data.task must give every family a weight > 0, got {task!r}; leave out what is never to be drawn")
    by_name: dict[str, dict[str, Any]] = {name: {} for name in weights}
    for option in options:
        name, key, value = _parse_option(option, weights)
        by_name[name][key] = value
    families = tuple(ReasoningFamily(name, weight, by_name[name]) for name, weight in weights.items())
    for family in families:
        _check_family(family)
    return ReasoningTask(task + "".join(f" {option}" for option in sorted(options)), families)


def verify(completion: str, row: Row) -> float:
    """Score an answer with the family's verifier, 0 to 1; 0 where the verifier cannot read the answer, even if it raises.

    Raises KeyError if the row was not made by `ReasoningTask`.
    """
    dataset, entry = _entry(row.extra["family"], row.extra["options"], row.extra["seed"])
    with Caught():  # a parser of the library may raise anything
        return float(dataset.score_answer(completion, entry))
    return 0.0


def _entry(family: str, options: str, seed: str) -> tuple[Any, Any]:
    """Generate the puzzle of a seed; returns its dataset of one row, which has the verifier, and the row."""
    dataset = _library().create_dataset(family, seed=int(seed), size=1, **json.loads(options))
    return dataset, dataset[0]


def _library(module: str = "reasoning_gym") -> Any:
    return import_extra(module, f"make rows for data.task = '{PREFIX}…'", extra="reasoning")


def _parse_option(option: str, names: Mapping[str, float]) -> tuple[str, str, Any]:
    match = _OPTION.fullmatch(option.strip())
    if match is None or match[1] not in names:
        raise DataError(
            f"each of data.task_options must be FAMILY.OPTION=VALUE with a family of data.task ({', '.join(names)}), got {option!r}")
    name, key, text = match.groups()
    if key in _FIXED:
        raise DataError(f"data.task_options must not set {key}, got {option!r}; {_FIXED[key]}")
    try:
        return name, key, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as exc:
        raise DataError(f"the value in data.task_options {option!r} is not TOML; write text in quotes, as {name}.{key}=\"text\"") from exc


def _check_family(family: ReasoningFamily) -> None:
    """Generate a first row, so that anything reasoning-gym refuses is known before anything starts."""
    known = _library("reasoning_gym.factory").DATASETS
    if family.name not in known:
        near = get_close_matches(family.name, known, n=3, cutoff=0.4) or sorted(known)
        raise DataError(f"reasoning-gym has no family {family.name!r}; it has {', '.join(near)}")
    with Caught() as caught:  # the library checks its options with assertions, and may raise anything
        _entry(family.name, json.dumps(dict(family.options)), "0")
    if (exc := caught.error) is not None:
        raise DataError(
            f"reasoning-gym refuses {family.name} with {dict(family.options) or 'its defaults'}: {exc or type(exc).__name__}; "
            "correct data.task_options") from exc
