"""Models that read images, on two ranks: replicated, in shards and divided by tensors, they learn what one rank does."""

from pathlib import Path

import numpy as np
import pytest

from image_world import World
from offbeat.config.root import Config
from offbeat.data.batch import Batch, SharedPrompts
from offbeat.trainer.model_trainer import ModelTrainer
from ranks import run_alone, run_ranks
from train_samples import CROSS_ENTROPY, arranged, own_share, take_step


def _batch(world):
    """Two answers to a prompt of two images, one to a prompt of one, and two texts."""
    texts = [np.arange(3, 15, dtype=np.int32), np.arange(20, 50, dtype=np.int32)]
    sequences, starts = [*world.sequences, *texts], [*world.prompt_lens, 4, 4]
    trained = np.concatenate([np.arange(len(each)) >= start for each, start in zip(sequences, starts, strict=True)])
    return Batch.of_next_tokens(
        np.concatenate(sequences), trained, lengths=list(map(len, sequences)), columns={"loss_weights": trained / trained.sum()},
        losses=(CROSS_ENTROPY,), shared=SharedPrompts(np.array([0, 0, 1, 2, 3]), np.array(starts)))


def _train(groups, folder):
    """By mesh, losses and norms of two steps and the log-probabilities of a canary with an image, before and after."""
    (family,) = (path.name for path in Path(folder).glob("*") if path.name != "runs" and path.is_dir())
    found, world = {}, World(Path(folder), family, store=Path(folder) / "runs" / ".images")
    for mesh in ("ddp",) if groups.world == 1 else ("ddp", "fsdp", "tp2"):
        config = Config.model_validate({"model": {"path": f"{folder}/{family}"}, "run": {"dir": f"{folder}/runs"}})
        trainer = ModelTrainer.build(f"{folder}/{family}", config=config.for_ranks, groups=arranged(groups, mesh))
        before = trainer.canary(world.sequences[2].tolist())
        part, micros = own_share(trainer, _batch(world), max_tokens=40)
        steps = [take_step(trainer, part, [micros]) for _ in range(2)]
        found[mesh] = [[step[f"train/{name}"] for step in steps for name in ("loss", "grad_norm")], before,
                       trainer.canary(world.sequences[2].tolist())]
    return found


@pytest.mark.drill
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "idefics3"])
def test_two_ranks_compute_in_every_mesh_what_one_does(tmp_path, family):
    World(tmp_path, family, store=tmp_path / "runs" / ".images")
    expected = run_alone(_train, argument=str(tmp_path))["ddp"]
    for found in run_ranks(_train, world=2, argument=str(tmp_path)):
        for mesh, values in found.items():
            for own, wanted in zip(values, expected, strict=True):
                np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-5, err_msg=mesh)
