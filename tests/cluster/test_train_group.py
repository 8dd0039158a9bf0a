"""Spreading a batch over ranks, and real ranks: two train as one does."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.cluster.local import LocalLauncher
from offbeat.cluster.messages import Objective
from offbeat.cluster.train_group import TrainGroup, make_shards
from offbeat.config.root import Config
from offbeat.data.batch import TokenBatch
from offbeat.data.packing import row_cost
from offbeat.errors import StorageError
from offbeat.model.hf_io import read_safetensors
from small_run import small_config
from train_samples import make_batch


def config_of(tmp_path: Path, model: str = "", **changes: str) -> Config:
    return small_config(tmp_path, model, train__max_tokens_per_microbatch="64", train__optimizer__lr="1e-2", **changes)


def sequences(batch: TokenBatch) -> list[tuple]:
    """Each sequence with all that the loss needs."""
    spans = zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    names = ("tokens", "loss_mask", "rollout_logprobs", "advantages", "loss_weights")
    return [tuple(value for name in names for value in getattr(batch, name)[low:high].tolist()) for low, high in spans]


@settings(max_examples=30, deadline=None)
@given(
    num_groups=st.integers(0, 9), group_size=st.integers(1, 4), num_ranks=st.integers(1, 4), num_minibatches=st.integers(1, 3),
    share=st.booleans(), seed=st.integers(0, 1000))
def test_every_sequence_is_on_one_rank_once_within_the_budget(num_groups, group_size, num_ranks, num_minibatches, share, seed) -> None:
    batch = make_batch(num_groups, group_size, seed=seed) if num_groups else make_batch(1, 1).select([])
    config = config_of(Path("runs"), train__num_ranks=str(num_ranks), train__share_prefix=str(share).lower())
    shards = make_shards(batch, config, num_minibatches=num_minibatches, seed=seed)
    assert len(shards) == num_ranks
    assert sorted(s for shard in shards for s in sequences(shard.batch)) == sorted(sequences(batch))
    assert len({tuple(len(step) for step in shard.minibatches) for shard in shards}) == 1
    assert len(shards[0].minibatches) == max(min(num_minibatches, num_groups), 1)
    for shard in shards:
        used = [index for step in shard.minibatches for micro in step for index in micro.tolist()]
        assert sorted(used) == list(range(len(shard.batch)))
        for step in shard.minibatches:
            assert all(row_cost(shard.batch.select(micro), share_prefix=share) <= 64 for micro in step)


def test_a_group_is_in_one_minibatch() -> None:
    batch = make_batch(6, 3)
    config = config_of(Path("runs"), train__num_ranks="2")
    prompts = []
    shards = make_shards(batch, config, num_minibatches=3, seed=1)
    for step in range(3):
        own = [shard.batch.select(np.concatenate(shard.minibatches[step])) for shard in shards]
        prompts.append({tuple(s[:5]) for part in own for s in sequences(part)})
    assert [len(p) for p in prompts] == [2, 2, 2]
    assert len(set.union(*prompts)) == 6


async def two_steps(config: Config, folder: Path, model: str) -> tuple[list[dict[str, float]], dict[str, np.ndarray], list[tuple]]:
    spans: list[tuple] = []
    async with LocalLauncher(stop_timeout_s=5) as launcher:
        group = await TrainGroup.start(
            launcher, config, model=model, build=None, log_dir=folder, on_span=lambda *span: spans.append(span))
        await group.set_objective(Objective("ppo", 10))
        stats = [await group.train_step(make_batch(5, 3, seed=step)) for step in range(2)]
        stats.append(await group.train_step(make_batch(1, 1).select([])))
        manifest = await group.publish(7, folder / "v7", canary=(3, 4, 5))
        assert (manifest.version, manifest.folder, manifest.canary) == (7, str(folder / "v7"), (3, 4, 5))
        assert len(manifest.fingerprint) == 32 and manifest.canary_logprob < 0
        await group.save(folder / "checkpoint")
        await group.train_step(make_batch(5, 3, seed=5))
        await group.load(folder / "checkpoint")
        again = await group.publish(8, folder / "v8", canary=(3, 4, 5))
        assert (again.fingerprint, again.canary_logprob) == (manifest.fingerprint, manifest.canary_logprob)
        with pytest.raises(StorageError, match="find no checkpoint"):
            await group.load(folder / "nothing")
        stats.append(await group.train_step(make_batch(5, 3, seed=6)))  # a failed load leaves all ranks in step
    return stats, {name: tensor.numpy() for name, tensor in read_safetensors(folder / "v7")}, spans


def test_two_ranks_train_as_one_does(tmp_path: Path, model_dir: str) -> None:
    async def main() -> list:
        folders = [tmp_path / "one", tmp_path / "two"]
        for folder in folders:
            folder.mkdir()
        # AdamW divides a gradient that is mere rounding by its own size; a larger epsilon leaves the comparison to real gradients.
        configs = [config_of(tmp_path, model_dir, train__num_ranks=str(n), train__optimizer__eps="1e-5") for n in (1, 2)]
        return await asyncio.gather(*(two_steps(c, f, model_dir) for c, f in zip(configs, folders, strict=True)))

    (one, weights_one, _), (two, weights_two, spans) = asyncio.run(main())
    for name in ("train/loss", "train/grad_norm", "train/tokens"):
        assert [s[name] for s in two] == pytest.approx([s[name] for s in one], abs=1e-5)
    assert one[0]["train/grad_norm"] > 0 and one[2]["train/tokens"] == 0
    for name, weight in weights_one.items():
        np.testing.assert_allclose(weights_two[name], weight, atol=1e-5)
    assert {track for _, track, _, _ in spans} == {"rank 0", "rank 1"}
    assert all(what == "train_step" and start <= end for what, _, start, end in spans)
