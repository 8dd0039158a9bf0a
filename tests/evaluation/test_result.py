"""What is written of an evaluation."""

import json
from pathlib import Path

import pytest

from evaluation.played import played
from offbeat.errors import StorageError
from offbeat.evaluation.files import read_samples
from offbeat.evaluation.result import ModelResult, SetResult, write
from offbeat.evaluation.scores import score_set

HELD_OUT, SUMS = played([[1.0], [0.0]]), played([[1.0]], name="sums")


def result(model: str) -> ModelResult:
    return ModelResult(model, (SetResult(HELD_OUT, score_set(HELD_OUT), 1.25), SetResult(SUMS, score_set(SUMS).with_own({}, failure="no"))))


def test_scores_are_one_file_and_answers_another_beside_it(tmp_path: Path) -> None:
    samples = write([result("a"), result("http://b")], tmp_path / "new" / "x.json")
    assert samples == tmp_path / "new" / "x.samples.jsonl"
    assert read_samples(samples) == {"a": {"": HELD_OUT, "sums": SUMS}, "http://b": {"": HELD_OUT, "sums": SUMS}}
    content = json.loads((tmp_path / "new" / "x.json").read_text())
    assert content["samples"] == "x.samples.jsonl" and [each["model"] for each in content["models"]] == ["a", "http://b"]
    first = content["models"][0]
    assert first["metrics"] == result("a").metrics() and first["wall_s"] == {"eval": 1.25, "eval/sums": 0.0}
    assert first["metric_failures"] == {"eval/sums": "no"}
    assert (first["metrics"]["eval/prompts"], first["metrics"]["eval/sums/prompts"]) == (2, 1)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    with pytest.raises(StorageError, match="--output"):
        write([result("a")], tmp_path / "x.json")
