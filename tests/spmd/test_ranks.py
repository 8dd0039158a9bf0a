"""The same groups give the same loss and gradient, however a run is made up: one process, SPMD ranks, or a controller's workers."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from offbeat.aio import SideThread
from offbeat.algorithms.experience import make_batch
from offbeat.config.root import Config
from offbeat.data.batch import Batch
from offbeat.data.trajectory import Group, Trajectory
from offbeat.ranks.ranks import WorkerRanks
from offbeat.ranks.sharding import Sharder
from offbeat.ranks.trainers import Trainers
from offbeat.spmd.ranks import HeadsLoad, OneRankLoads, OwnRank, _pad
from offbeat.trainer.worker import build_trainers
from offbeat.workers.worker import make_launcher
from ranks import run_alone, run_ranks
from small_run import small_config

CHANGES = {"train__max_tokens_per_microbatch": "32", "train__optimizer__lr": "1e-2", "train__optimizer__eps": "1e-5"}


def groups_of(count: int, *, seed: int) -> list[Group]:
    """Groups of three samples of different lengths; one sample without a reward, one with nothing generated."""
    rng = np.random.default_rng(seed)
    groups = []
    for index in range(count):
        prompt = rng.integers(3, 20, 4)
        trajectories = []
        for sample in range(3):
            generated = 0 if (index, sample) == (1, 2) else int(rng.integers(1, 14))
            mask = np.arange(4 + generated) >= 4
            trajectories.append(Trajectory(
                tokens=np.concatenate([prompt, rng.integers(3, 20, generated)]), loss_mask=mask,
                rollout_logprobs=np.where(mask, -3.0 + 0.1 * rng.standard_normal(len(mask)), 0.0), versions=np.where(mask, 0, -1),
                reward=float("nan") if (index, sample) == (2, 0) else float(rng.standard_normal()), reason="stop"))
        groups.append(Group(f"0:{index}", 0, tuple(trajectories)))
    return groups


def batch_of(groups: list[Group], config: Config) -> Batch:
    return make_batch(groups, config=config.algorithm, max_new_tokens=16)


def figures(stats: list[dict[str, float]]) -> list[list[float]]:
    return [[one["train/loss"], one["train/grad_norm"], one["train/tokens"]] for one in stats]


def settings(argument: dict) -> tuple[Config, int]:
    changes = CHANGES | {"algorithm__loss_aggregation": argument["aggregation"]}
    return small_config(Path(argument["folder"]), argument["model"], **changes), argument["num_groups"]


def on_a_rank(groups, argument):
    """Two steps for each way of loading, from the same weights."""
    config, num_groups = settings(argument)
    rank, world = groups.rank, groups.world

    async def steps(kind: type) -> list[dict[str, float]]:
        own = build_trainers(config.model.path, config.for_ranks, groups)
        one_loads = kind is OneRankLoads
        sharder = Sharder.of(config.for_ranks, model=config.model.path, num_ranks=world if one_loads else 1)
        thread = SideThread("rank")
        trainers = Trainers(OwnRank(own, kind(groups.sync, sharder), thread), config.for_ranks)
        await trainers.restart_optimizer(config.train.optimizer, total_steps=10)
        stats = []
        for seed in range(2):
            drawn = groups_of(num_groups, seed=seed)
            mine = (drawn if rank == 0 else []) if one_loads else drawn[rank::world]
            stats.append(await trainers.train_step(batch_of(mine, config)))
        stats.append(await trainers.train_step(batch_of([], config)))  # nothing to train on is a step, too
        thread.close()
        return stats

    return [figures(asyncio.run(steps(kind))) for kind in (OneRankLoads, HeadsLoad)]


def scored_on_a_rank(groups, argument):
    """For each way of loading, what this rank gets for what it has drawn, by sequence: of the policy after a step, and of its reference."""
    config, num_groups = settings(argument)
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"kl_loss": "k3"})})

    async def scores(kind: type) -> list[dict[str, list[float]]]:
        one_loads = kind is OneRankLoads
        sharder = Sharder.of(config.for_ranks, model=config.model.path, num_ranks=groups.world if one_loads else 1)
        thread = SideThread("rank")
        own = build_trainers(config.model.path, config.for_ranks, groups)
        trainers = Trainers(OwnRank(own, kind(groups.sync, sharder), thread), config.for_ranks)
        drawn = groups_of(num_groups, seed=0)
        batch = batch_of((drawn if groups.rank == 0 else []) if one_loads else drawn[groups.rank :: groups.world], config)
        await trainers.train_step(batch.with_columns(ref_logprobs=batch.columns["rollout_logprobs"]))
        seen = []
        for of, with_entropy in (("policy", True), ("reference", False)):
            found = await trainers.score(batch, of=of, with_entropy=with_entropy)
            found = found.columns
            assert list(found) == (["logprobs", "entropy"] if with_entropy else ["logprobs"])
            assert all(values.shape == (batch.num_targets,) for values in found.values())
            seen += [by_sequence(batch, values) for values in found.values() if len(values)]
        await trainers.score(batch_of([], config))  # nothing to score is nothing wrong
        thread.close()
        return seen

    return [asyncio.run(scores(kind)) for kind in (OneRankLoads, HeadsLoad)]


def by_sequence(batch: Batch, values: np.ndarray) -> dict[str, list[float]]:
    return {
        str(batch.tokens[low:high].tolist()): values[batch.target_sequences == i].tolist()
        for i, (low, high) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True))}


async def with_workers(config: Config, num_groups: int, folder: Path) -> list[list[float]]:
    async with make_launcher(config.for_launcher) as launcher:
        ranks = await WorkerRanks.start(launcher, config.for_ranks, model=config.model.path, build=None, log_dir=folder)
        group = Trainers(ranks, config.for_ranks)
        await group.restart_optimizer(config.train.optimizer, total_steps=10)
        stats = [await group.train_step(batch_of(groups_of(num_groups, seed=seed), config)) for seed in range(2)]
        return figures([*stats, await group.train_step(batch_of([], config))])


@pytest.mark.parametrize(("world", "num_groups", "aggregation", "launcher"), [
    (2, 6, "sequence_mean", ""), pytest.param(4, 7, "token_mean", "local", marks=pytest.mark.drill),
    pytest.param(2, 7, "token_mean", "ray", marks=pytest.mark.ray),
])
def test_every_mode_gives_the_same_loss_and_gradient(
    world: int, num_groups: int, aggregation: str, launcher: str, tmp_path: Path, model_dir: str,
) -> None:
    argument = {"folder": str(tmp_path), "model": model_dir, "num_groups": num_groups, "aggregation": aggregation}
    alone, alone_again = run_alone(on_a_rank, argument=argument)
    assert alone == pytest.approx(np.array(alone_again), abs=1e-6) and alone[0][1] > 0 and alone[2][2] == 0
    for one_loads, heads_load in run_ranks(on_a_rank, world=world, argument=argument):
        np.testing.assert_allclose(one_loads, alone, atol=1e-5)
        np.testing.assert_allclose(heads_load, alone, atol=1e-5)
    if launcher:
        changes = CHANGES | {"algorithm__loss_aggregation": aggregation, "train__num_ranks": str(world), "cluster__launcher": launcher}
        config = small_config(tmp_path, model_dir, **changes)
        np.testing.assert_allclose(asyncio.run(with_workers(config, num_groups, tmp_path)), alone, atol=1e-5)


def test_every_way_of_loading_gives_each_rank_the_scores_of_what_it_has_drawn(tmp_path: Path, model_dir: str) -> None:
    argument = {"folder": str(tmp_path), "model": model_dir, "num_groups": 5, "aggregation": "token_mean"}
    alone, alone_again = run_alone(scored_on_a_rank, argument=argument)
    assert len(alone) == 3 and alone[0] != alone[2], "the policy has left its reference"
    pairs = run_ranks(scored_on_a_rank, world=2, argument=argument)
    for i, expected in enumerate(alone):
        (one, nothing), (first, second) = ([rank[kind][i : i + 1] for rank in pairs] for kind in (0, 1))
        assert nothing == [], "a rank that draws nothing has nothing to know"
        assert set(first[0]) | set(second[0]) == set(expected) and not set(first[0]) & set(second[0])
        for found in (*one, first[0] | second[0], alone_again[i]):
            assert found.keys() == expected.keys()
            for sequence, values in expected.items():
                np.testing.assert_allclose(found[sequence], values, atol=1e-4)  # the step before was equal to rounding


def test_ranks_with_fewer_microbatches_get_empty_ones() -> None:
    one = np.array([0, 1])
    padded = _pad(((one,),), [2, 1])
    assert [[len(micro) for micro in minibatch] for minibatch in padded] == [[2, 0], [0]]
