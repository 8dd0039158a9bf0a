"""Files of evaluations in a run's folder."""

from pathlib import Path

import pytest
import zstandard

from offbeat.errors import StorageError
from offbeat.telemetry.evaluation_log import forget_evaluations, stored_evaluations, write_evaluation


def test_evaluations_are_known_by_their_step_and_set(tmp_path: Path) -> None:
    assert stored_evaluations(tmp_path) == {}
    paths = [write_evaluation(tmp_path, step=step, name=name, lines=[b"{}"]) for step, name in ((0, ""), (2, ""), (2, "a_1"), (10, ""))]
    (tmp_path / "evaluations" / "step-000002-notes.txt").touch()
    assert list(stored_evaluations(tmp_path).items()) == list(zip(paths, [(0, ""), (2, ""), (2, "a_1"), (10, "")], strict=True))
    forget_evaluations(tmp_path, after=2)
    assert list(stored_evaluations(tmp_path)) == paths[:3]


def test_a_step_that_is_written_again_replaces_the_file_and_a_source_that_fails_does_not(tmp_path: Path) -> None:
    def fails():
        yield b"new"
        raise RuntimeError

    path = write_evaluation(tmp_path, step=1, name="", lines=[b"old"])
    with pytest.raises(RuntimeError):
        write_evaluation(tmp_path, step=1, name="", lines=fails())
    write_evaluation(tmp_path, step=2, name="", lines=[b"one", b"two"])
    assert write_evaluation(tmp_path, step=2, name="", lines=[b"1", b"2"]).read_bytes() != path.read_bytes()
    assert zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read() == b"old\n"


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "evaluations").touch()
    with pytest.raises(StorageError, match="keep_samples"):
        write_evaluation(tmp_path, step=1, name="", lines=[])
