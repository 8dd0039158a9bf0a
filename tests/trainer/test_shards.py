"""Saving and going on: exactly on as many ranks, to rounding on another number or mesh, and safely on a full disk."""

import itertools
import resource
from pathlib import Path

import numpy as np
import pytest

from offbeat.errors import RunError, StorageError
from offbeat.model.tiny import build_tiny
from offbeat.trainer.messages import Folder
from ranks import run_alone, run_ranks
from train_samples import MESHES, TINY, build_model, build_trainer, make_batch, train

SAVED, AFTER = [make_batch(3, 2, seed=seed) for seed in range(2)], [make_batch(3, 2, seed=seed) for seed in range(2, 4)]

pytestmark = pytest.mark.drill


def _save_and_go_on(groups, folder):
    """By mesh: results after the save, results after loading it anew, and the error of saving to a full disk."""
    results = {}
    for mesh in MESHES[groups.world]:
        target = Path(folder) / f"{mesh}{groups.world}"
        trainer = build_trainer(groups, f"{folder}/model", mesh=mesh)
        train(trainer, SAVED)
        trainer.save(Folder(str(target)))
        straight_on = train(trainer, AFTER)
        error = _save_to_full_disk(groups, trainer, target) if groups.world > 1 else ""
        resumed = build_trainer(groups, f"{folder}/model", mesh=mesh)
        resumed.canary([1, 2, 3])
        resumed.load(Folder(str(target)))
        results[mesh] = {"straight_on": straight_on, "step": resumed.step, "resumed": train(resumed, AFTER), "error": error}
    for mesh, other in itertools.permutations(MESHES[groups.world], 2):
        moved = build_trainer(groups, f"{folder}/model", mesh=other)
        moved.load(Folder(f"{folder}/{mesh}{groups.world}"))
        results[other][mesh] = train(moved, AFTER)
    return results


def _save_to_full_disk(groups, trainer, target):
    """Only the last rank has no room; every rank must hear of it."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if groups.rank == groups.world - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    try:
        trainer.save(Folder(str(target)))
    except StorageError as exc:
        return str(exc)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    return "no error"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    build_model(folder / "model")
    return folder, run_ranks(_save_and_go_on, world=2, argument=str(folder))


@pytest.mark.parametrize("mesh", MESHES[2])
def test_a_resumed_run_goes_on_exactly(saved, mesh):
    _, ranks = saved
    for rank in ranks:
        assert rank[mesh]["step"] == len(SAVED)
        assert rank[mesh]["resumed"] == rank[mesh]["straight_on"]


@pytest.mark.parametrize("mesh", MESHES[2])
def test_a_full_disk_on_one_rank_is_told_to_all_and_harms_nothing(saved, mesh):
    folder, ranks = saved
    for rank in ranks:
        assert "could not be written; what was saved before is intact (rank 1:" in rank[mesh]["error"]
    assert not list(folder.glob("*.part"))


@pytest.mark.parametrize("mesh", MESHES[2])
def test_a_checkpoint_of_one_mesh_is_resumed_in_another(saved, mesh):
    _, ranks = saved
    for rank, saved_by in itertools.product(ranks, set(MESHES[2]) - {mesh}):
        np.testing.assert_allclose(rank[mesh][saved_by], rank["ddp"]["straight_on"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("saved_by", [f"{mesh}2" for mesh in MESHES[2]])
def test_two_ranks_are_resumed_by_one(saved, saved_by):
    folder, ranks = saved

    def resume(groups, _):
        trainer = build_trainer(groups, f"{folder}/model")
        trainer.load(Folder(str(folder / saved_by)))
        return trainer.step, train(trainer, AFTER)

    step, results = run_alone(resume)
    assert step == len(SAVED)
    np.testing.assert_allclose(results, ranks[0]["ddp"]["straight_on"], rtol=1e-5, atol=1e-5)


def test_one_rank_saves_and_goes_on_exactly_and_can_save_over(saved):
    folder, _ = saved
    for _ in range(2):
        results = run_alone(_save_and_go_on, argument=str(folder))
        assert results["ddp"]["resumed"] == results["ddp"]["straight_on"]


def test_a_checkpoint_that_is_not_there_is_a_storage_error(saved, tmp_path):
    folder, _ = saved

    def load_nothing(groups, _):
        with pytest.raises(StorageError, match="1 of 1 ranks find no checkpoint in .*nothing"):
            build_trainer(groups, f"{folder}/model").load(Folder(str(tmp_path / "nothing")))

    run_alone(load_nothing)


def test_a_checkpoint_of_another_model_is_refused(saved, tmp_path):
    folder, _ = saved
    other = tmp_path / "other"
    build_tiny(other, tiny=TINY, vocab_size=29, eos_token_id=1, pad_token_id=0, seed=7)

    def load_other(groups, _):
        with pytest.raises(RunError, match="could not be read"):
            build_trainer(groups, other).load(Folder(str(folder / "fsdp2")))

    run_alone(load_other)
