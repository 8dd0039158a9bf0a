"""The load-balancing loss of a mixture of experts in training, over a whole minibatch, however it is split over ranks and micro-batches;
and the metrics of its routers.

The loss multiplies how often each expert is chosen, which has no gradient, with its mean probability. The former must be known for the
whole minibatch before the first backward pass. With one micro-batch per rank it is summed over the ranks between forward and backward
pass; with several, each micro-batch runs once without gradients before. Called by `Trainer`, once per minibatch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.config.for_processes import RankConfig
from offbeat.data.batch import Batch
from offbeat.data.packing import PackedRow
from offbeat.model.logprobs import packs_rows
from offbeat.model.router_watch import RouterWatch
from offbeat.model.routers import RouterRecord, balancing_loss, experts_per_token, recorded, sequence_ends
from offbeat.sync.mesh import ProcessGroups

Run = Callable[[PackedRow], None]
"""Runs a row without gradients."""

Wait = Callable[[], AbstractContextManager]
"""Surrounds a wait for other ranks, within a stretch of computation."""


class MinibatchLoss(Protocol):
    """The loss of a minibatch's routers, micro-batch by micro-batch; `metrics`, equal on all ranks, are complete after the last."""

    metrics: dict[str, float]

    def recording(self, row: PackedRow) -> AbstractContextManager:
        """Surround a row's forward pass."""
        ...

    def added_to(self, loss: Tensor, *, scale: float) -> Tensor:
        """Return the scalar loss of the row recorded last plus `scale` times its part of the routers' loss; may be collective."""
        ...


class RouterLoss(Protocol):
    """The loss of a model's routers."""

    def of_minibatch(self, batch: Batch, rows: Sequence[PackedRow], *, run: Run, wait: Wait) -> MinibatchLoss:
        """Begin a minibatch, of equally many rows on all ranks; may run them, and is collective."""
        ...


def router_loss_of(module: nn.Module, config: RankConfig, groups: ProcessGroups, *, is_policy: bool) -> RouterLoss:
    """Return the loss of a model's routers.

    A policy's routers are watched where its rows run packed and its layers are not compiled, into which the watch would cut. `module` is
    called in forward passes: a model, bare or wrapped. Raises as `experts_per_token`.
    """
    coefficient, bare = config.train.router_aux_loss_coefficient, getattr(module, "module", module)
    loss = LoadBalancing(module, coefficient, groups) if coefficient else NoRouterLoss()
    if not is_policy or config.train.compile or not packs_rows(module):
        return loss
    assert isinstance(bare, PreTrainedModel), "a strategy wraps a model once"
    watch = RouterWatch(bare, replays=config.model.route_replay != "off")
    return WatchedRouters(loss, watch, groups) if watch.num_layers else loss


class NoRouterLoss:
    """Trains without the loss."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def of_minibatch(self, batch: Batch, rows: Sequence[PackedRow], *, run: Run, wait: Wait) -> MinibatchLoss:  # noqa: ARG002
        return self

    def recording(self, row: PackedRow) -> AbstractContextManager:  # noqa: ARG002
        return nullcontext()

    def added_to(self, loss: Tensor, *, scale: float) -> Tensor:  # noqa: ARG002
        return loss


class LoadBalancing:
    """The loss of `offbeat.model.routers`, times a coefficient."""

    def __init__(self, module: nn.Module, coefficient: float, groups: ProcessGroups) -> None:
        """`module` is called in forward passes. Raises as `experts_per_token`."""
        self.module = module
        self.coefficient = coefficient
        bare = getattr(module, "module", module)
        assert isinstance(bare, PreTrainedModel), "a strategy wraps a model once"
        self.top_k = experts_per_token(bare)
        self._groups = groups

    def of_minibatch(self, batch: Batch, rows: Sequence[PackedRow], *, run: Run, wait: Wait) -> MinibatchLoss:
        minibatch = _Balanced(self, batch, wait)
        if len(rows) > 1:
            minibatch.count(rows, run)
        return minibatch

    def summed(self, records: Sequence[RouterRecord]) -> "RouterLoad":
        """Sum records over all ranks; collective."""
        counts_LE = sum(torch.stack(record.counts) for record in records)
        probs_E = sum(record.probs_E.detach().double() for record in records if record.probs_E is not None)
        assert isinstance(counts_LE, Tensor) and isinstance(probs_E, Tensor), "a minibatch has rows, and each has run"
        num_tokens = counts_LE.new_tensor([sum(record.num_tokens for record in records)])
        packed = _over_ranks(torch.cat([counts_LE.flatten(), probs_E, num_tokens]).cpu(), self._groups)
        num_counts = counts_LE.numel()
        return RouterLoad(packed[:num_counts].view_as(counts_LE), packed[num_counts:-1], packed[-1].item())


def _over_ranks(sums: Tensor, groups: ProcessGroups) -> Tensor:
    """Add sums over all ranks, in place; collective. Ranks of a tensor group have the same tokens, so only the first one counts."""
    if groups.world > 1:
        if groups.rank % groups.shape.tp:
            sums.zero_()
        dist.all_reduce(sums, group=groups.cpu_group)
    return sums


class WatchedRouters:
    """The loss of a model's routers, or none, and the metrics of their choices in the forward passes of training."""

    def __init__(self, loss: RouterLoss, watch: RouterWatch, groups: ProcessGroups) -> None:
        self.watch = watch
        self.groups = groups
        self._loss = loss

    def of_minibatch(self, batch: Batch, rows: Sequence[PackedRow], *, run: Run, wait: Wait) -> MinibatchLoss:
        return _Watched(self, self._loss.of_minibatch(batch, rows, run=run, wait=wait), wait, num_rows=len(rows))


class _Watched:
    """See `MinibatchLoss`."""

    def __init__(self, routers: WatchedRouters, loss: MinibatchLoss, wait: Wait, *, num_rows: int) -> None:
        self.metrics: dict[str, float] = {}
        self._routers = routers
        self._loss = loss
        self._wait = wait
        self._num_left = num_rows
        routers.watch.take()  # of a minibatch that was not finished

    @contextmanager
    def recording(self, row: PackedRow) -> Iterator[None]:
        with self._loss.recording(row), self._routers.watch.watching():
            yield

    def added_to(self, loss: Tensor, *, scale: float) -> Tensor:
        """See `MinibatchLoss`. After the last row, the sums of all ranks become metrics."""
        added, watch = self._loss.added_to(loss, scale=scale), self._routers.watch
        self._num_left -= 1
        if not self._num_left:
            with self._wait():
                sums = _over_ranks(watch.take(), self._routers.groups)
            self.metrics = watch.metrics_of(sums) | self._loss.metrics
        return added


@dataclass(frozen=True, eq=False)
class RouterLoad:
    """The load of the experts in a minibatch.

    Attributes:
        counts: [L, E] float64, how often the router of each layer chose each expert.
        probs: [E] float64, sums of the experts' probabilities over tokens and layers.
    """

    counts: Tensor
    probs: Tensor
    num_tokens: float

    def loss_of(self, probs_E: Tensor) -> Tensor:
        """Return the part of the loss of tokens with these sums of probabilities, [] float with gradient."""
        num_rows = max(self.num_tokens, 1.0) * len(self.counts)
        return balancing_loss(self.counts.sum(0).to(probs_E), probs_E, num_rows=num_rows)

    @property
    def metrics(self) -> dict[str, float]:
        """The whole loss, and the load of a layer's busiest expert by the mean load, averaged over layers; 0 without tokens."""
        busiest = self.counts.max(dim=1).values / self.counts.mean(dim=1).clamp(min=1e-9)
        return {"router/aux_loss": self.loss_of(self.probs).item(), "router/load_imbalance": busiest.mean().item()}


class _Balanced:
    """See `MinibatchLoss`."""

    def __init__(self, loss: LoadBalancing, batch: Batch, wait: Wait) -> None:
        self.metrics: dict[str, float] = {}
        self._loss = loss
        self._batch = batch
        self._wait = wait
        self._load: RouterLoad | None = None
        self._record: RouterRecord | None = None

    def count(self, rows: Sequence[PackedRow], run: Run) -> None:
        """Run all rows without gradients, and sum the choices of their tokens over ranks; collective."""
        records = []
        for row in rows:
            with self.recording(row) as record:
                run(row)
            records.append(record)
        self._set(self._loss.summed(records))

    @contextmanager
    def recording(self, row: PackedRow) -> Iterator[RouterRecord]:
        record = RouterRecord(sequence_ends(self._batch, row), top_k=self._loss.top_k)
        with recorded(self._loss.module, record):
            yield record
        self._record = record

    def added_to(self, loss: Tensor, *, scale: float) -> Tensor:
        assert self._record is not None and self._record.probs_E is not None, "a row has run"
        if self._load is None:
            with self._wait():
                self._set(self._loss.summed([self._record]))
        assert self._load is not None, "it has been summed"
        return loss + self._load.loss_of(self._record.probs_E) * (self._loss.coefficient * scale)

    def _set(self, load: RouterLoad) -> None:
        self._load, self.metrics = load, load.metrics
