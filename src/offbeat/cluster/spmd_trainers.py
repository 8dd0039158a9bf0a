"""SPMD mode's trainers: this rank's engine, and how a batch comes to it. Every rank calls the same methods in the same order.

`rollout.single_rank_load` chooses the way of the batch: `OneRankLoads` scatters rank 0's over the gloo group, `HeadsLoad` trains every rank
on what it drew itself. The loss is the same either way, because all denominators are global.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from offbeat.cluster.messages import Objective, Shard
from offbeat.cluster.rank_thread import RankThread
from offbeat.cluster.shards import Sharder
from offbeat.config.root import Config
from offbeat.data import wire
from offbeat.data.batch import TokenBatch
from offbeat.dist.platform import current_platform
from offbeat.dist.sync import Sync
from offbeat.trainer.engine import TrainEngine
from offbeat.types import Version
from offbeat.weights.protocol import Manifest


@dataclass(frozen=True)
class Busy:
    """Seconds that a rank computed in one step, without waiting for others."""

    seconds: float


@dataclass(frozen=True)
class Drawn:
    """What a head has drawn: the denominator of its loss weights, and its micro-batches per minibatch."""

    denominator: float
    num_microbatches: tuple[int, ...]


class Loading(Protocol):
    """How the batch of a step comes to this rank."""

    def shard(self, batch: TokenBatch, *, num_minibatches: int, seed: int) -> Shard:
        """This rank's share, given what it has drawn; collective."""
        ...

    def observe(self, busy_s: Sequence[float]) -> dict[str, float]:
        """Metrics of the balance of a step, from the seconds each rank computed."""
        ...


class OneRankLoads:
    """Rank 0 has the whole batch and hands each rank its share."""

    def __init__(self, sync: Sync, sharder: Sharder) -> None:
        self._sync = sync
        self._sharder = sharder

    def shard(self, batch: TokenBatch, *, num_minibatches: int, seed: int) -> Shard:
        """See `Loading.shard`; what other ranks give is not looked at."""
        parts = None
        if self._sync.rank == 0:
            parts = [wire.encode(shard) for shard in self._sharder.shards(batch, num_minibatches=num_minibatches, seed=seed)]
        return wire.decode(Shard, self._sync.scatter("distributed_batch", parts))

    def observe(self, busy_s: Sequence[float]) -> dict[str, float]:
        """See `Loading.observe`; empty but on rank 0."""
        return self._sharder.observe(busy_s) if self._sync.rank == 0 else {}


class HeadsLoad:
    """Every rank has drawn its own batch; its loss weights are brought to the denominator of all."""

    def __init__(self, sync: Sync, sharder: Sharder) -> None:
        """`sharder` is for one rank."""
        self._sync = sync
        self._sharder = sharder

    def shard(self, batch: TokenBatch, *, num_minibatches: int, seed: int) -> Shard:
        """See `Loading.shard`."""
        (own,) = self._sharder.shards(batch, num_minibatches=num_minibatches, seed=seed)
        drawn = Drawn(batch.denominator, tuple(len(minibatch) for minibatch in own.minibatches))
        everyones = self._sync.gather("train_batch", drawn)
        total = sum(one.denominator for one in everyones)
        weights = own.batch.loss_weights * np.float32(batch.denominator / max(total, 1.0))
        counts = [max(count[i] if i < len(count) else 1 for count in (one.num_microbatches for one in everyones))
                  for i in range(max(len(one.num_microbatches) for one in everyones))]
        return Shard(replace(own.batch, loss_weights=weights, denominator=total), _pad(own.minibatches, counts))

    def observe(self, busy_s: Sequence[float]) -> dict[str, float]:
        """See `Loading.observe`."""
        return {"balance/lost_s": max(busy_s) - sum(busy_s) / len(busy_s)}


class RankTrainers:
    """This rank's engine as the loop's trainers; calls run in the rank's thread."""

    def __init__(self, engine: TrainEngine, loading: Loading, config: Config, thread: RankThread) -> None:
        self._engine = engine
        self._loading = loading
        self._config = config
        self._thread = thread

    async def set_objective(self, objective: Objective) -> None:
        """See `Trainers.set_objective`."""
        config = self._config
        optimizer = config.sft.optimizer if objective.name == "sft" else config.train.optimizer
        await self._thread.call(
            self._engine.set_objective, objective.name, algorithm=config.algorithm, optimizer=optimizer, total_steps=objective.total_steps)

    async def train_step(self, batch: TokenBatch, *, num_minibatches: int = 1) -> dict[str, float]:
        """See `Trainers.train_step`."""
        return await self._thread.call(self._train_step, batch, num_minibatches)

    async def publish(self, version: Version, folder: Path, *, canary: tuple[int, ...]) -> Manifest:
        """See `Trainers.publish`; only rank 0 looks at `folder`, and only its answer has a fingerprint."""
        return await self._thread.call(self._publish, version, folder, canary)

    async def save(self, folder: Path) -> None:
        """See `Trainers.save`."""
        await self._thread.call(self._engine.save, folder)

    async def load(self, folder: Path) -> None:
        """See `Trainers.load`."""
        await self._thread.call(self._engine.load, folder)

    async def export(self, folder: Path, *, tokenizer: str) -> None:
        """See `Trainers.export`."""
        await self._thread.call(self._export, folder, Path(tokenizer))

    def _train_step(self, batch: TokenBatch, num_minibatches: int) -> dict[str, float]:
        seed = self._config.run.seed + self._engine.step
        shard = self._loading.shard(batch, num_minibatches=num_minibatches, seed=seed)
        start_s = current_platform.busy_clock()
        stats = self._engine.train_step(shard.batch, shard.minibatches)
        busy = self._engine.groups.sync.gather("step_times", Busy(current_platform.busy_clock() - start_s))
        return stats.metrics | self._loading.observe([one.seconds for one in busy])

    def _export(self, folder: Path, tokenizer: Path) -> None:
        self._engine.export(folder, tokenizer_folder=tokenizer, dtype=self._config.model.dtype)
        self._engine.groups.sync.barrier("save_hf_done", timeout_s=self._config.checkpoint.timeout_s)  # rank 0 writes meanwhile

    def _publish(self, version: Version, folder: Path, canary: tuple[int, ...]) -> Manifest:
        canary_logprob = self._engine.canary(canary)
        fingerprint = self._engine.publish(folder, dtype=self._config.model.dtype)
        return Manifest(version, str(folder), fingerprint, canary, canary_logprob)


def _pad(minibatches: tuple[tuple[np.ndarray, ...], ...], counts: Sequence[int]) -> tuple[tuple[np.ndarray, ...], ...]:
    """Minibatches of `counts` micro-batches each, with empty ones at the end: all ranks run as many forward passes."""
    empty = np.zeros(0, np.int64)
    given = [*minibatches, *([()] * (len(counts) - len(minibatches)))]
    return tuple((*own, *([empty] * (count - len(own)))) for own, count in zip(given, counts, strict=True))
