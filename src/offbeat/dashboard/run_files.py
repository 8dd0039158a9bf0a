"""Reads the files of a run leniently, so that a run that crashed or still continues is shown as far as it got."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from offbeat.data.stored_rollouts import KeptGroup, kept_files, read_groups
from offbeat.errors import DataError
from offbeat.evaluation.files import read_samples
from offbeat.evaluation.samples import EvaluatedSet
from offbeat.telemetry.evaluation_log import RESULT_NAME, stored_evaluations
from offbeat.telemetry.jsonl import read_json_lines
from offbeat.telemetry.trace import Span, TraceReader, read_trace

TRACE = "trace.json"

_EVALUATION_FOLDER = "-eval"
"""End of the name of each folder of `offbeat eval`; such a folder has a result only once the first model is evaluated."""

_LARGEST = 1e100
_MOST_GROUPS = 32
_MOST_PROMPTS = 256
_MOST_EVALUATIONS = 16
"""Files of answers that are held in memory: two of each run that a live page shows."""


@dataclass(frozen=True)
class RunFiles:
    """Records of one run; each is empty if its file is missing.

    Attributes:
        is_evaluation: whether this is a folder of `offbeat eval`, not of a run.
        evaluation: the result of `offbeat eval`.
        groups: the first groups of the newest step whose rollouts were kept.
        answers: answers to the first prompts of one evaluation set, by global step: of the run's first evaluation and of its last, such
            as 0 and 60; empty unless there are two.
    """

    name: str
    config_text: str
    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    spans: Sequence[Span]
    result: Mapping[str, Any]
    is_evaluation: bool = False
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[KeptGroup] = ()
    answers: Mapping[int, EvaluatedSet] = field(default_factory=dict)

    def points(self, metric: str) -> list[tuple[float, float]]:
        """Return a metric as (global step, value); rows without the metric, or with a value that is not a finite number, are left out."""
        rows = (row for row in self.metrics if "global_step" in row and _finite(row.get(metric)))
        return [(float(row["global_step"]), float(row[metric])) for row in rows]

    def values(self, metric: str) -> list[float]:
        """Return the values of a metric in the order of steps."""
        return [value for _, value in self.points(metric)]

    def setting(self, section: str, key: str) -> Any:
        """Return a value of the run's configuration, or None if it is missing."""
        table = self.config.get(section, {})
        return table.get(key) if isinstance(table, Mapping) else None

    def bound(self, section: str, key: str) -> float | None:
        """Return a number of the run's configuration, or None if it is missing or not a number."""
        value = self.setting(section, key)
        return value if _finite(value) else None


def read_run(run_dir: Path, *, trace: TraceReader | None = None) -> RunFiles:
    """Read a run's folder; `trace` reads its time line on from its last read, None reads all of it.

    Raises DataError if there is no such folder, or it contains neither `config.toml` nor `metrics.jsonl`.
    """
    check_run(run_dir)
    config_text = _read_text(run_dir / "config.toml")
    return RunFiles(
        name=run_dir.resolve().name,
        config_text=config_text,
        config=_toml(config_text),
        metrics=[numbers(row) for row in read_json_lines(run_dir / "metrics.jsonl")],
        events=[row for row in read_json_lines(run_dir / "events.jsonl") if _finite(row.get("time_s"))],
        spans=trace.read() if trace else read_trace(run_dir / TRACE),
        result=_json_object(_read_text(run_dir / "result.json")),
        is_evaluation=is_evaluation(run_dir),
        evaluation=_json_object(_read_text(run_dir / RESULT_NAME)),
        groups=_newest_groups(run_dir),
        answers=_first_and_last_answers(run_dir),
    )


def check_run(run_dir: Path) -> None:
    """Check that a folder is a run's; errors are those of `read_run`."""
    if not run_dir.is_dir():
        raise DataError(f"run folder {run_dir} does not exist; give a folder such as runs/NAME")
    if not is_run(run_dir):
        raise DataError(f"{run_dir} is not a run's folder: it has neither config.toml nor metrics.jsonl; give a folder such as runs/NAME")


def is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file() or (folder / "metrics.jsonl").is_file()


def is_evaluation(folder: Path) -> bool:
    """Whether a folder, if it has the files of a run, is that of an `offbeat eval`, which has records but no configuration."""
    if (folder / "config.toml").is_file():
        return False
    return (folder / RESULT_NAME).is_file() or folder.resolve().name.endswith(_EVALUATION_FOLDER)


def _newest_groups(run_dir: Path) -> list[KeptGroup]:
    files = [file for file in kept_files(run_dir) if not file.is_rejected]
    try:
        return list(islice(read_groups(files[-1]), _MOST_GROUPS)) if files else []
    except DataError:
        return []  # a damaged file costs the report its samples


def _first_and_last_answers(run_dir: Path) -> dict[int, EvaluatedSet]:
    stored = stored_evaluations(run_dir)
    name = min((name for _, name in stored.values()), default="")  # "", the held-out prompts, where the run has some
    files = [(step, path) for path, (step, other) in stored.items() if other == name]
    if len(files) < 2:
        return {}
    try:
        return {step: _answers(path, path.stat().st_mtime_ns)[name] for step, path in (files[0], files[-1])}
    except (DataError, KeyError, OSError):
        return {}


@lru_cache(maxsize=_MOST_EVALUATIONS)
def _answers(path: Path, _mtime_ns: int) -> Mapping[str, EvaluatedSet]:
    """Return the first answers of each set in a file; it is read again when it has changed, as by a run that repeats steps.

    Raises DataError if it is damaged, KeyError if it has no answers.
    """
    return read_samples(path, most=_MOST_PROMPTS)[""]


def _finite(value: Any) -> bool:
    """Whether a value is a number that can be drawn; no run produces numbers as large as the limit."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a row that can be drawn."""
    return {name: value for name, value in row.items() if _finite(value)}


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return {}  # a torn file is still shown as text


def _json_object(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {"result": parsed}
