"""Checkpoints of strangers: what torch wrote is read, and what would run is refused and does not."""

import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from offbeat.trainer.metadata import SafePlanner, SafeReader


class Bomb:
    """Touches a file as it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self):
        return Path.touch, (self._file,)


def state():
    return {
        "model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"lr": 0.5, "betas": (0.9, 0.95), "foreach": None, "name": "adamw"}, "step": 7}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "saved"), no_dist=True)
    return tmp_path / "saved"


def load(folder: Path):
    into = {"model": {"a": torch.zeros(2, 3), "b": torch.zeros(3, dtype=torch.bfloat16)},
            "optimizer": {"lr": 0.0, "betas": (0.0, 0.0), "foreach": None, "name": ""}, "step": 0}
    dcp.load(into, storage_reader=SafeReader(folder), planner=SafePlanner(), no_dist=True)
    return into


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointException) as told:
        load(folder)
    return str(told.value.failures[0][0])


def test_what_torch_wrote_is_read(folder: Path) -> None:
    loaded, wanted = load(folder), state()
    assert torch.equal(loaded["model"]["a"], wanted["model"]["a"]) and torch.equal(loaded["model"]["b"], wanted["model"]["b"])
    assert (loaded["optimizer"], loaded["step"]) == (wanted["optimizer"], 7)


def test_a_description_that_would_run_code_is_refused_and_runs_none(folder: Path, tmp_path: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Bomb(tmp_path / "ran")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "is not a description of a checkpoint" in (said := refusal(folder))
    assert "it names pathlib.Path.touch, which is in no checkpoint; nothing in it was executed" in said
    assert not (tmp_path / "ran").exists()


def test_a_number_that_would_run_code_is_refused_and_runs_none(folder: Path, tmp_path: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == "step")
    file = folder / place.relative_path
    bomb = io.BytesIO()
    torch.save(Bomb(tmp_path / "ran"), bomb)
    place.offset, place.length = file.stat().st_size, len(bomb.getvalue())
    file.write_bytes(file.read_bytes() + bomb.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "Weights only load failed" in refusal(folder)
    assert not (tmp_path / "ran").exists()


def test_a_description_does_not_lead_out_of_its_folder(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../other/__0_0.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "it names the file '../other/__0_0.distcp'" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"rubbish", pickle.dumps({"a": 1})])
def test_what_is_no_description_is_told_in_a_sentence(folder: Path, content: bytes) -> None:
    (folder / ".metadata").write_bytes(content)
    assert "is not a description of a checkpoint, or it is damaged" in refusal(folder)
