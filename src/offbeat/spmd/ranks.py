"""SPMD mode's ranks: this rank's trainer, and its share of each batch. Every rank calls the same methods in the same order.

`rollout.single_rank_load` chooses the source of the batch: `OneRankLoads` scatters rank 0's over the gloo group, `HeadsLoad` trains every
rank on its own. The loss is the same either way, because all denominators are global.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from offbeat.aio import SideThread
from offbeat.algorithms.adam import AdamParams
from offbeat.data import wire
from offbeat.data.batch import Batch
from offbeat.ranks.sharding import Sharder
from offbeat.sync.sync import Sync
from offbeat.trainer.messages import Policy, ScoredShare, ScoreShare, TrainStep
from offbeat.trainer.worker import Part, find_trainer

T = TypeVar("T")
Score = Callable[[ScoreShare], ScoredShare]


@dataclass(frozen=True)
class DrawnBatch:
    """A head's own batch: the denominator of its loss weights, and the number of its micro-batches in each minibatch, e.g. (3, 2)."""

    denominator: float
    num_microbatches: tuple[int, ...]


class Loading(Protocol):
    """Source of this rank's share of a batch."""

    def share(self, batch: Batch, params: AdamParams, *, num_minibatches: int, seed: int) -> TrainStep:
        """Return this rank's share, given its own batch; collective."""
        ...

    def score(self, batch: Batch, score: Score, *, of: Policy, with_entropy: bool) -> list[ScoredShare]:
        """Let every rank `score` a share, and return the scored shares of this rank's own batch; collective."""
        ...

    def observe(self, busy_s: Sequence[float]) -> dict[str, float]:
        """Return balance metrics of a step, from the seconds that each rank computed."""
        ...

    @property
    def sharder(self) -> Sharder:
        """What spreads batches in this process."""
        ...


class OneRankLoads:
    """Rank 0 has the whole batch and hands each rank its share."""

    def __init__(self, sync: Sync, sharder: Sharder) -> None:
        self._sync = sync
        self.sharder = sharder

    def share(self, batch: Batch, params: AdamParams, *, num_minibatches: int, seed: int) -> TrainStep:
        """See `Loading.share`; the batches of other ranks are ignored."""
        parts = None
        if self._sync.rank == 0:
            parts = [wire.encode(share) for share in self.sharder.shards(batch, params, num_minibatches=num_minibatches, seed=seed)]
        return wire.decode(TrainStep, self._sync.scatter("distributed_batch", parts))

    def score(self, batch: Batch, score: Score, *, of: Policy, with_entropy: bool) -> list[ScoredShare]:
        """See `Loading.score`; the batches of other ranks are ignored."""
        parts = None
        if self._sync.rank == 0:
            parts = [wire.encode(share) for share in self.sharder.score_shares(batch, of=of, with_entropy=with_entropy)]
        scored = score(wire.decode(ScoreShare, self._sync.scatter("score_batch", parts)))
        everyones = self._sync.gather("scores", scored)
        return everyones if self._sync.rank == 0 else [scored.empty()]

    def observe(self, busy_s: Sequence[float]) -> dict[str, float]:
        """See `Loading.observe`; empty except on rank 0."""
        return self.sharder.observe(busy_s) if self._sync.rank == 0 else {}


class HeadsLoad:
    """Every rank has drawn its own batch, whose loss weights are rescaled to the common denominator."""

    def __init__(self, sync: Sync, sharder: Sharder) -> None:
        """`sharder` is for one rank."""
        self._sync = sync
        self.sharder = sharder

    def share(self, batch: Batch, params: AdamParams, *, num_minibatches: int, seed: int) -> TrainStep:
        (own,) = self.sharder.shards(batch, params, num_minibatches=num_minibatches, seed=seed)
        drawn = DrawnBatch(batch.denominator, tuple(len(minibatch) for minibatch in own.minibatches))
        everyones = self._sync.gather("train_batch", drawn)
        total = sum(one.denominator for one in everyones)
        weights = own.batch.columns["loss_weights"] * np.float32(batch.denominator / max(total, 1.0))
        counts = [max(count[i] if i < len(count) else 1 for count in (one.num_microbatches for one in everyones))
                  for i in range(max(len(one.num_microbatches) for one in everyones))]
        whole = replace(own.batch.with_columns(loss_weights=weights), denominator=total)
        return TrainStep(whole, _pad(own.minibatches, counts), params)

    def score(self, batch: Batch, score: Score, *, of: Policy, with_entropy: bool) -> list[ScoredShare]:
        """See `Loading.score`; every rank scores its own batch."""
        (own,) = self.sharder.score_shares(batch, of=of, with_entropy=with_entropy)
        most = self._sync.max_scalars("score_rows", {"microbatches": len(own.microbatches)})["microbatches"]
        (padded,) = _pad((own.microbatches,), [int(most)])
        return [score(replace(own, microbatches=padded))]

    def observe(self, busy_s: Sequence[float]) -> dict[str, float]:
        return {"balance/lost_s": max(busy_s) - sum(busy_s) / len(busy_s)}


class OwnRank:
    """This rank's trainer as `Ranks`; calls run in the rank's thread."""

    num_called = 1
    spreads_ahead = False  # ranks spread a batch together, in the thread that trains

    def __init__(self, trainers: Mapping[str, Part], loading: Loading, thread: SideThread, *, host: str = "127.0.0.1") -> None:
        """`trainers` are this rank's by part, "" for the policy; `host` is the address of rank 0's machine for engines."""
        self.host = host
        self._trainers = trainers
        self._loading = loading
        self._thread = thread

    @property
    def sharder(self) -> Sharder:
        return self._loading.sharder

    @property
    def alive(self) -> bool:
        """Always true: the rank itself asks."""
        return True

    async def call(self, method: str, requests: Sequence[Any], reply: type[T], *, timeout_s: float) -> list[T]:  # noqa: ARG002
        (request,) = requests
        return await self._thread.run(method, partial(self._call, method, request, timeout_s))

    async def spread(self, batch: Batch, params: AdamParams, *, num_minibatches: int, seed: int, ahead: bool = False) -> list[TrainStep]:
        assert not ahead, "ranks spread a batch together"
        share = partial(self._loading.share, batch, params, num_minibatches=num_minibatches, seed=seed)
        return [await self._thread.run("train_step", share)]

    async def score(
        self, method: str, batch: Batch, *, of: Policy, with_entropy: bool, timeout_s: float,  # noqa: ARG002
    ) -> list[ScoredShare]:
        trainer, verb = find_trainer(self._trainers, method)
        score = partial(self._loading.score, batch, getattr(trainer, verb), of=of, with_entropy=with_entropy)
        return await self._thread.run(method, score)

    def observe(self, busy_s: Sequence[float]) -> dict[str, float]:
        return self._loading.observe(busy_s)

    def _call(self, method: str, request: Any, timeout_s: float) -> list[Any]:
        trainer, verb = find_trainer(self._trainers, method)
        answer, sync = getattr(trainer, verb)(request), trainer.groups.sync
        if verb == "train_step":
            return sync.gather("step_times", answer)
        if verb == "export":
            sync.barrier("save_hf_done", timeout_s=timeout_s)  # rank 0 writes meanwhile
        return [answer]


def _pad(minibatches: tuple[tuple[np.ndarray, ...], ...], counts: Sequence[int]) -> tuple[tuple[np.ndarray, ...], ...]:
    """Pad minibatches with empty micro-batches to `counts` each, so that all ranks run equally many forward passes.

    A micro-batch is [N] int64, indices of sequences. For example, ([0, 1],) with a count of 2 becomes ([0, 1], []).
    """
    empty = np.zeros(0, np.int64)
    given = [*minibatches, *([()] * (len(counts) - len(minibatches)))]
    return tuple((*own, *([empty] * (count - len(own)))) for own, count in zip(given, counts, strict=True))
