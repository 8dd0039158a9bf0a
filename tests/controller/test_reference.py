"""Log-probabilities of the reference are computed once, read back whole, and refused where they are of other data."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from offbeat.controller.parts import SingleProcess
from offbeat.controller.reference import Reference, ReferenceFile, open_reference
from offbeat.errors import ConfigError

ROWS = [[(np.arange(4, dtype=np.int32), np.array([False, False, True, True]))], [], [
    (np.array([5, 6], np.int32), np.array([False, True])), (np.array([5, 7, 8], np.int32), np.array([False, True, True]))]]


class Scorer:
    """Scores a token by its id, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, sequences: Sequence) -> np.ndarray:
        self.calls += 1
        return np.concatenate([np.zeros(0), *(-tokens[mask] for tokens, mask in sequences)]).astype(np.float32)


def play(path: Path, scorer: Scorer, *, key: str = "a", resumes: bool = False, draws: bool = True, rows: list = ROWS) -> Reference:
    return asyncio.run(open_reference(
        ReferenceFile(path, key, resumes), rows, chunk=2, score=scorer, peers=SingleProcess(), draws=draws))


def values(reference: Reference) -> list[list[float]]:
    return [reference.row(index).tolist() for index in range(reference.num_rows)]


def test_it_is_computed_in_chunks_once_and_read_back(tmp_path: Path) -> None:
    scorer, path = Scorer(), tmp_path / "reference" / "train.safetensors"
    first = play(path, scorer)
    assert values(first) == [[-2.0, -3.0], [], [-6.0, -7.0, -8.0]] and scorer.calls == 2
    assert values(play(path, scorer, resumes=True)) == values(first) and scorer.calls == 2
    assert [file.name for file in path.parent.iterdir()] == ["train.safetensors"]


def test_a_run_that_resumes_refuses_one_of_other_data_and_a_new_run_computes_it_again(tmp_path: Path) -> None:
    scorer, path = Scorer(), tmp_path / "train.safetensors"
    play(path, scorer)
    for changed in ({"key": "b"}, {"rows": ROWS[:2]}):
        with pytest.raises(ConfigError, match="are of other preferences: the data, the model, .* start over with another run.name"):
            play(path, scorer, resumes=True, **changed)  # type: ignore[arg-type]
    assert values(play(path, scorer, rows=ROWS[:1])) == [[-2.0, -3.0]] and scorer.calls == 3


def test_one_that_cannot_be_read_is_computed_again_unless_the_run_resumes(tmp_path: Path) -> None:
    scorer, path = Scorer(), tmp_path / "train.safetensors"
    path.write_bytes(b"not a file of tensors")
    with pytest.raises(ConfigError, match="train.safetensors' cannot be read .*; delete it, and it is computed again"):
        play(path, scorer, resumes=True)
    assert play(path, scorer).num_rows == 3


def test_a_rank_that_does_not_draw_scores_with_the_others_and_keeps_nothing(tmp_path: Path) -> None:
    scorer = Scorer()
    assert play(tmp_path / "train.safetensors", scorer, draws=False).num_rows == 0 and scorer.calls == 2
