"""Compares two runs: the first step, group and token, or metric, at which they part, and what changed between them.

Called by `offbeat diff`. It reads the files of their folders alone: settings, plan, metrics and journal. Torch-free.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.controller.step_replay import compares
from offbeat.data import wire
from offbeat.data.identity import Identity
from offbeat.data.trajectory import Group, Trajectory
from offbeat.errors import ConfigError, DataError
from offbeat.journal.history import PastStep, read_history
from offbeat.runs.plan import read_plan
from offbeat.telemetry.jsonl import read_json_lines

_OWN = ("run.name", "run.dir", "run.resume", "run.private", "telemetry.", "weights.dir", "checkpoint.")
"""Settings in which two runs may differ without computing anything else."""

_MOST_SHOWN = 120


@dataclass(frozen=True)
class Parting:
    """Where two runs part.

    Attributes:
        group: prompt id of the group; "" if it concerns no single group.
        sample, token: numbers of the sample in its group and of the token in its sequence, from 0; None if it concerns no single one.
        metric: name of the metric; "" if it is none.
    """

    global_step: int
    text: str
    group: str = ""
    sample: int | None = None
    token: int | None = None
    metric: str = ""


@dataclass(frozen=True)
class RunDifference:
    """Two runs compared.

    Attributes:
        changed: a sentence on each difference of settings, data, model, code and versions.
        parting: None if they do the same in all steps that both have.
        num_steps: steps that both have.
        num_with_groups: of these, the ones whose groups are in both journals.
    """

    changed: tuple[str, ...]
    parting: Parting | None
    num_steps: int
    num_with_groups: int


@dataclass(frozen=True)
class _Recorded:
    """What is known of a run; `identity` is None where its journal has no step."""

    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    rows: Mapping[int, Mapping[str, Any]]
    steps: Mapping[int, PastStep]
    identity: Identity | None

    @property
    def spreads(self) -> bool:
        """Whether it has several ranks, over which sequences are spread by the times that were measured."""
        return (self.settings.get("train.num_ranks"), self.settings.get("run.mode")) != (1, "controller")


def compare_runs(first: Path, second: Path) -> RunDifference:
    """Compare the runs of two folders; raises ConfigError if one is not a run's, DataError or StorageError if files cannot be read."""
    a, b = _recorded(first), _recorded(second)
    both = sorted((a.rows.keys() | a.steps.keys()) & (b.rows.keys() | b.steps.keys()))
    partings = (each for number in both for each in _partings(number, a, b))
    return RunDifference(
        tuple(_changed(a, b)), next(partings, None), len(both), sum(number in a.steps and number in b.steps for number in both))


def _recorded(run_dir: Path) -> _Recorded:
    file = run_dir / "config.toml"
    if not file.is_file():
        raise ConfigError(f"{run_dir} has no config.toml, so it is not the folder of a run; give one, such as runs/my-run")
    try:
        settings = dict(_flat(tomllib.loads(file.read_text(encoding="utf-8"))))
    except tomllib.TOMLDecodeError as exc:
        raise DataError(f"{file} is not TOML: {exc}") from exc
    versions = read_plan(run_dir).versions if (run_dir / "plan.json").is_file() else {}
    rows = {row["global_step"]: row for row in read_json_lines(run_dir / "metrics.jsonl") if isinstance(row.get("global_step"), int)}
    steps = read_history(run_dir / "journal").steps
    identity = wire.decode_json(Identity, next(iter(steps.values())).identity) if steps else None
    return _Recorded(settings, versions, {number: row for number, row in rows.items() if number}, steps, identity)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _changed(a: _Recorded, b: _Recorded) -> Iterator[str]:
    for key in sorted(a.settings.keys() | b.settings.keys()):
        was, now = a.settings.get(key), b.settings.get(key)
        if was != now and not key.startswith(_OWN):
            yield f"{key} is {_shown(was)} in A and {_shown(now)} in B"
    for name in dict.fromkeys([*a.versions, *b.versions]):
        if (was := a.versions.get(name, "unknown")) != (now := b.versions.get(name, "unknown")):
            yield f"{name} is {was} in A and {now} in B"
    if a.identity is None or b.identity is None:
        return
    if a.identity.data != b.identity.data:
        counts = "" if a.identity.num_rows == b.identity.num_rows else f": {a.identity.num_rows} in A and {b.identity.num_rows} in B"
        yield f"the rows to train on differ{counts}"
    if a.identity.model != b.identity.model:
        yield "the initial models differ"
    if a.identity.tokenizer != b.identity.tokenizer:
        yield "the tokenizers differ"
    for setting, digest in a.identity.code.items():
        if b.identity.code.get(setting, digest) != digest:
            yield f"the files of the code of {setting} differ"


def _shown(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _partings(number: int, a: _Recorded, b: _Recorded) -> Iterator[Parting]:
    """Yield the differences of a step, in the order in which they come about: its groups, their spreading, metrics, and weights."""
    first, second = a.steps.get(number), b.steps.get(number)
    if first is not None and second is not None:
        yield from _of_groups(number, first, second)
        if a.spreads and first.computed is not None and second.computed is not None and first.computed.cost != second.computed.cost:
            yield from _of_metrics(number, a.rows.get(number, {}), b.rows.get(number, {}), spread=True)
    yield from _of_metrics(number, a.rows.get(number, {}), b.rows.get(number, {}))
    if first is not None and second is not None and first.computed is not None and second.computed is not None:
        was, now = first.computed.fingerprint, second.computed.fingerprint
        if was != now:
            yield Parting(
                number, f"the weights after it differ, with all metrics equal: their fingerprints are {was[:12]} in A and {now[:12]} in B")


def _of_groups(number: int, first: PastStep, second: PastStep) -> Iterator[Parting]:
    ids, others = ([each.prompt_id for each in step.groups] for step in (first, second))
    for place, (mine, other) in enumerate(zip(ids, others, strict=False)):
        if mine != other:
            again = " (the same groups in another order)" if sorted(ids) == sorted(others) else ""
            yield Parting(number, f"its group {place} is that of prompt {mine} in A and of {other} in B{again}", mine)
            return
        yield from _of_group(number, first.groups[place].read(), second.groups[place].read())
    if len(ids) != len(others):
        yield Parting(number, f"it trains on {len(ids)} groups in A and on {len(others)} in B")


def _of_group(number: int, mine: Group, other: Group) -> Iterator[Parting]:
    name = f"the group of prompt {mine.prompt_id}"
    if len(mine.trajectories) != len(other.trajectories):
        yield Parting(number, f"{name} has {len(mine.trajectories)} samples in A and {len(other.trajectories)} in B", mine.prompt_id)
    for sample, (one, two) in enumerate(zip(mine.trajectories, other.trajectories, strict=False)):
        if (found := _of_sample(one, two)) is not None:
            token, text = found
            where = f"sample {sample}" if token is None else f"sample {sample}, token {token}"
            yield Parting(number, f"in {name}, {where}: {text}", mine.prompt_id, sample, token)
    if mine.admitted_version != other.admitted_version:
        yield Parting(
            number, f"{name} was admitted at version {mine.admitted_version} in A and {other.admitted_version} in B", mine.prompt_id)


def _of_sample(one: Trajectory, two: Trajectory) -> tuple[int | None, str] | None:
    """Return the first token at which two samples differ, or None if it is none of their tokens, and how."""
    length = min(len(one), len(two))
    columns = [np.asarray(each[0][:length]) != np.asarray(each[1][:length]) for each in (
        (one.tokens, two.tokens), (one.loss_mask, two.loss_mask), (one.versions, two.versions))]
    unlike = np.asarray(one.rollout_logprobs[:length]).view(np.uint32) != np.asarray(two.rollout_logprobs[:length]).view(np.uint32)
    places = np.flatnonzero(np.logical_or.reduce([*columns, unlike]))
    if places.size:
        at = int(places[0])
        return at, _of_token(one, two, at)
    if len(one) != len(two):
        return length, f"it has {len(one)} tokens in A and {len(two)} in B"
    if one.reward != two.reward and not (np.isnan(one.reward) and np.isnan(two.reward)):
        return None, f"the reward is {float(one.reward)!r} in A and {float(two.reward)!r} in B, for the same tokens"
    if one.reason != two.reason:
        return None, f"it ended with {one.reason!r} in A and {two.reason!r} in B"
    return None


def _of_token(one: Trajectory, two: Trajectory, at: int) -> str:
    mine, other = int(one.tokens[at]), int(two.tokens[at])
    generated = bool(one.loss_mask[at]) and bool(two.loss_mask[at])
    if not generated and mine != other:
        return f"the model was given token {mine} in A and {other} in B, so the prompt or what a tool answered is another"
    versions = int(one.versions[at]), int(two.versions[at])
    if versions[0] != versions[1]:
        return f"it was sampled by version {versions[0]} of the weights in A and by {versions[1]} in B"
    if mine != other:
        return f"the engine sampled token {mine} in A and {other} in B, by version {versions[0]} of the weights in both"
    logprobs = float(one.rollout_logprobs[at]), float(two.rollout_logprobs[at])
    return (
        f"the same token was sampled with log-probability {logprobs[0]!r} in A and {logprobs[1]!r} in B, by version {versions[0]} in both,"
        " so the engines' weights or numbers differ")


def _of_metrics(number: int, row: Mapping[str, Any], other: Mapping[str, Any], *, spread: bool = False) -> Iterator[Parting]:
    names: Sequence[str] = [name for name in row if name in other and compares(name)]
    for name in names:
        if row[name] != other[name]:
            why = ", of the same groups, which were spread over the ranks in another way" if spread else ""
            yield Parting(number, f"{name} is {row[name]!r} in A and {other[name]!r} in B{why}", metric=name)
