"""SPMD mode's trainers: this rank's engine, and how a batch comes to it. Every rank calls the same methods in the same order.

`rollout.single_rank_load` chooses the way of the batch: `OneRankLoads` scatters rank 0's over the gloo group, `HeadsLoad` trains every rank
on what it drew itself. The loss is the same either way, because all denominators are global.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from offbeat.aio import SideThread
from offbeat.cluster.messages import BroadcastRequest, ExportRequest, Objective, PublishRequest, Shard
from offbeat.cluster.rank_engine import RankEngine
from offbeat.cluster.shards import Sharder
from offbeat.config.root import Config
from offbeat.data import wire
from offbeat.data.batch import TokenBatch
from offbeat.dist.sync import Sync
from offbeat.types import Version
from offbeat.weights.protocol import Manifest

OnSpan = Callable[[str, str, float, float], None]


@dataclass(frozen=True)
class Times:
    """When a rank began and ended a step, in wall-clock seconds, and how many of them it computed without waiting for others."""

    start_s: float
    end_s: float
    busy_s: float


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

    def __init__(
        self, engine: RankEngine, loading: Loading, config: Config, thread: SideThread, *, on_span: OnSpan, host: str = "127.0.0.1",
    ) -> None:
        """`on_span(name, track, start_s, end_s)` hears what each rank did; `host` is rank 0's machine, as engines reach it."""
        self._engine = engine
        self._loading = loading
        self._config = config
        self._thread = thread
        self._on_span = on_span
        self._host = host

    async def set_objective(self, objective: Objective) -> None:
        """See `Trainers.set_objective`."""
        await self._thread.run("set_objective", partial(self._engine.set_objective, objective))

    async def train_step(self, batch: TokenBatch, *, num_minibatches: int = 1) -> dict[str, float]:
        """See `Trainers.train_step`."""
        metrics, times = await self._thread.run("train_step", partial(self._train_step, batch, num_minibatches))
        for rank, one in enumerate(times):
            self._on_span("train_step", f"rank {rank}", one.start_s, one.end_s)
        return metrics

    async def publish(self, version: Version, folder: Path, *, canary: tuple[int, ...], num_receivers: int = 0) -> Manifest:
        """See `WriteVersion`; only rank 0 looks at `folder` and `num_receivers`, and only its answer has a fingerprint."""
        broadcast = BroadcastRequest(self._host, num_receivers, self._config.weights.stage_timeout_s) if num_receivers else None
        request = PublishRequest(version, str(folder), self._config.model.dtype, canary, broadcast)
        published = await self._thread.run("publish", partial(self._engine.publish, request))
        return Manifest(version, str(folder), published.fingerprint, canary, published.canary_logprobs, published.broadcast)

    async def save(self, folder: Path) -> None:
        """See `Trainers.save`."""
        await self._thread.run("save", partial(self._engine.save, folder))

    async def load(self, folder: Path) -> int:
        """See `Trainers.load`."""
        await self._thread.run("load", partial(self._engine.load, folder))
        return self._engine.step

    async def export(self, folder: Path, *, tokenizer: str) -> None:
        """See `Trainers.export`."""
        await self._thread.run("export", partial(self._export, ExportRequest(str(folder), tokenizer)))

    def _train_step(self, batch: TokenBatch, num_minibatches: int) -> tuple[dict[str, float], list[Times]]:
        shard = self._loading.shard(batch, num_minibatches=num_minibatches, seed=self._config.run.seed + self._engine.step)
        trained = self._engine.train_step(shard)
        times = self._engine.groups.sync.gather("step_times", Times(trained.start_s, trained.end_s, trained.busy_s))
        return trained.metrics | self._loading.observe([one.busy_s for one in times]), times

    def _export(self, request: ExportRequest) -> None:
        self._engine.export(request)
        self._engine.groups.sync.barrier("save_hf_done", timeout_s=self._config.checkpoint.timeout_s)  # rank 0 writes meanwhile


def _pad(minibatches: tuple[tuple[np.ndarray, ...], ...], counts: Sequence[int]) -> tuple[tuple[np.ndarray, ...], ...]:
    """Minibatches of `counts` micro-batches each, with empty ones at the end: all ranks run as many forward passes."""
    empty = np.zeros(0, np.int64)
    given = [*minibatches, *([()] * (len(counts) - len(minibatches)))]
    return tuple((*own, *([empty] * (count - len(own)))) for own, count in zip(given, counts, strict=True))
