"""The result of an evaluation: scores and answers of one model on some sets, and of several models as one file. Pure but for `write`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.errors import StorageError
from offbeat.evaluation.files import encode_lines, samples_beside, write_lines
from offbeat.evaluation.samples import EvaluatedSet
from offbeat.evaluation.scores import Evaluation


@dataclass(frozen=True)
class SetResult:
    """A model's answers to one set, their scores, and the seconds that answering and scoring took."""

    played: EvaluatedSet
    scores: Evaluation
    wall_s: float = 0.0


@dataclass(frozen=True)
class ModelResult:
    """Answers of one model, named as a folder, run or URL, to all sets: the held-out prompts first, if there are some."""

    model: str
    sets: tuple[SetResult, ...]

    @property
    def evaluations(self) -> list[Evaluation]:
        """The scores on each set."""
        return [each.scores for each in self.sets]

    @property
    def played(self) -> Mapping[str, EvaluatedSet]:
        """The answers to each set by its name; "" are the held-out prompts."""
        return {each.played.name: each.played for each in self.sets}

    def metrics(self) -> dict[str, float]:
        """Return all scores by the names of metrics, with the number of prompts of each set."""
        return {
            name: value for each in self.evaluations
            for name, value in {**each.metrics(), f"{each.folder}/prompts": each.num_prompts}.items()}


def write(results: Sequence[ModelResult], path: Path) -> Path:
    """Write scores as JSON, and answers beside it as JSON lines; returns the file of answers. Raises StorageError if it cannot write."""
    samples = samples_beside(path)
    write_lines(samples, (
        line for result in results for played in result.played.values() for line in encode_lines(played, model=result.model)))
    content = {"samples": samples.name, "models": [_as_json(result) for result in results]}
    try:
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", errors="backslashreplace")
    except OSError as exc:
        raise StorageError(f"cannot write {path}: {exc.strerror}; free space, or choose another file with --output") from exc
    return samples


def _as_json(result: ModelResult) -> dict[str, Any]:
    failures = {each.scores.folder: each.scores.own_failure for each in result.sets if each.scores.own_failure}
    return {
        "model": result.model, "metrics": result.metrics(), "wall_s": {each.scores.folder: round(each.wall_s, 3) for each in result.sets},
        **({"metric_failures": failures} if failures else {})}
