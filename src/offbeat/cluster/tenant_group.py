"""All ranks that train tenants' adapters, as one trainer. Torch-free.

A pass may hold sequences of any of the tenants; what it adds to one tenant's gradient does not depend on the others. Calls are made one
after the other, in the same order on every rank. When a rank has died, or has lost step with the others, every call fails until `restart`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np

from offbeat.algorithms.adam import AdamParams
from offbeat.cluster.group import Launcher, Nothing, Worker, ask_all
from offbeat.cluster.messages import BuildRequest
from offbeat.cluster.ranks import end_ranks, start_ranks
from offbeat.cluster.tenant_messages import (
    BaseCanary,
    BaseCanaryScored,
    DatumShard,
    TenantFolder,
    TenantName,
    TenantPass,
    TenantPublish,
    TenantPublished,
    TenantRestore,
    TenantRestored,
    TenantsDiscard,
    TenantShard,
    TenantStart,
    TenantsUpdate,
    TenantsUpdated,
)
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.root import Config
from offbeat.data.balance import partition
from offbeat.data.batch import TokenBatch, gather_ranges
from offbeat.data.datums import DatumBatch
from offbeat.errors import DeadlineError, RunError, WorkerError
from offbeat.telemetry.tracker import combine
from offbeat.trainer.adapter_types import DatumPass
from offbeat.types import Version
from offbeat.weights.protocol import Manifest

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Passed:
    """What a pass over many tenants' sequences gave.

    Attributes:
        logprobs: [T] float32, of the tokens in the loss mask, 0 on others; as in the batch.
        metrics: by tenant, over all ranks.
    """

    logprobs: np.ndarray
    metrics: Mapping[str, Mapping[str, float]]


class TenantGroup:
    """R ranks that train many adapters on one base model.

    Attributes:
        steps: by tenant whose adapter is here, the optimizer steps that it has taken.
    """

    def __init__(self, workers: Sequence[Worker], config: Config, *, start_anew: Callable[[], Awaitable[Sequence[Worker]]]) -> None:
        """`start_anew` gives other ranks on the same base model."""
        self.steps: dict[str, int] = {}
        self._workers = workers
        self._config = config
        self._start_anew = start_anew
        self._turn = asyncio.Lock()
        self._failed = False

    @classmethod
    async def start(cls, launcher: Launcher, config: Config, *, model: str, build: BuildRequest | None, log_dir: Path) -> Self:
        """Start all ranks and wait until they have met and loaded the model."""
        target = "offbeat.cluster.tenant_worker:TenantWorker"
        start = partial(start_ranks, launcher, config, target, model=model, log_dir=log_dir)
        return cls(await start(build=build), config, start_anew=partial(start, build=None))

    @property
    def alive(self) -> bool:
        """Whether calls can succeed."""
        return not self._failed and all(worker.alive for worker in self._workers)

    @property
    def dead(self) -> tuple[str, ...]:
        """Names of the ranks whose processes have ended."""
        return tuple(worker.name for worker in self._workers if not worker.alive)

    async def restart(self) -> None:
        """End all ranks, at once also those that hang, and start them anew, without any tenant. Calls in flight fail.

        Raises:
            WorkerError, DeathError, DeadlineError: they do not start; may be called again.
        """
        self._failed = True
        await end_ranks(self._workers)
        async with self._turn:
            if self._failed:  # else another call has done it
                self.steps.clear()
                self._workers = await self._start_anew()
                self._failed = False

    async def add(self, tenant: str, *, rank: int, alpha: float, seed: int, modules: Sequence[str], folder: str = "") -> None:
        """Give a tenant an adapter: a fresh one, or one that goes on from a PEFT folder."""
        self.steps[tenant] = 0  # its name is taken while it is made
        try:
            await self._all("add", TenantStart(tenant, rank, alpha, seed, tuple(modules), folder), Nothing)
        except BaseException:
            self.steps.pop(tenant, None)
            raise

    async def remove(self, tenant: str) -> None:
        """Forget a tenant."""
        await self._all("remove", TenantName(tenant), Nothing)
        self.steps.pop(tenant, None)

    async def learn(
        self, batch: TokenBatch, tenants: Sequence[str], *, objective: Literal["ppo", "sft"], algorithm: AlgorithmConfig,
    ) -> Passed:
        """Score sequences, each under its tenant's adapter, and add their gradients to those that the tenants have gathered.

        Args:
            tenants: [N], of each sequence; loss weights are normalised by tenant.
        """
        return await self._whole(self._run(batch, tenants, objective, algorithm, learn=True), tenants)

    async def score(self, batch: TokenBatch, tenants: Sequence[str]) -> np.ndarray:
        """[T] float32 log-probabilities of the tokens in the loss mask, each sequence under its tenant's adapter, 0 on others."""
        return (await self._run(batch, tenants, "sft", AlgorithmConfig(), learn=False)).logprobs

    async def _run(
        self, batch: TokenBatch, tenants: Sequence[str], objective: str, algorithm: AlgorithmConfig, *, learn: bool,
    ) -> Passed:
        shares = self._shares(batch.lengths)
        shards = [
            TenantShard(batch.select(share), tuple(str(tenants[i]) for i in share), objective, algorithm.model_dump_json(), learn)
            for share in shares]
        answers = await self._each("run", shards, TenantPass)
        logprobs = np.zeros(batch.num_tokens, np.float32)
        for share, answer in zip(shares, answers, strict=True):
            logprobs[gather_ranges(batch.offsets, share)] = answer.logprobs
        parts = {tenant: [answer.stats[tenant] for answer in answers if tenant in answer.stats] for tenant in sorted(set(tenants))}
        return Passed(logprobs, {tenant: combine(own).values() for tenant, own in parts.items() if own})

    async def run_datums(self, batch: DatumBatch, tenants: Sequence[str], *, learn: bool) -> DatumPass:
        """Score datums, each under its tenant's adapter, and if `learn` add their gradients to those that the tenants have gathered.

        Args:
            tenants: [N], of each datum.
        """
        run = self._run_datums(batch, tenants, learn=learn)
        return await (self._whole(run, tenants) if learn else run)

    async def _run_datums(self, batch: DatumBatch, tenants: Sequence[str], *, learn: bool) -> DatumPass:
        shares = self._shares(batch.lengths)
        shards = [DatumShard(batch.select(share), tuple(str(tenants[i]) for i in share), learn) for share in shares]
        answers = await self._each("run_datums", shards, DatumPass)
        logprobs, losses = np.zeros(batch.num_targets, np.float32), np.zeros(len(batch), np.float32)
        for share, answer in zip(shares, answers, strict=True):
            logprobs[gather_ranges(batch.sequence_target_offsets, share)] = answer.logprobs
            losses[share] = answer.losses
        return DatumPass(logprobs, losses)

    async def _whole(self, passing: Awaitable[T], tenants: Sequence[str]) -> T:
        """What a pass gives; where it fails, none of its tenants keeps a gradient, for another rank may have added its part."""
        try:
            return await passing
        except BaseException:
            if self.alive:
                await self.discard(sorted(set(tenants) & self.steps.keys()))
            raise

    async def discard(self, tenants: Sequence[str]) -> None:
        """Drop the gradients that tenants have gathered."""
        await self._all("discard", TenantsDiscard(tuple(tenants)), Nothing)

    async def update(self, params: Mapping[str, AdamParams]) -> dict[str, float]:
        """One optimizer step for each tenant named; norms of their gradients, not finite where the update was left out."""
        updated, *_ = await self._all("update", TenantsUpdate(dict(params)), TenantsUpdated)
        self.steps.update(updated.steps)
        return updated.grad_norms

    async def score_base(self, canary: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probability of each of canary[1:] under the base model."""
        scored, *_ = await self._all("score_base", BaseCanary(canary), BaseCanaryScored)
        return scored.logprobs

    async def publish(self, tenant: str, version: Version, folder: Path, *, canary: tuple[int, ...]) -> Manifest:
        """Write a tenant's adapter into a new PEFT folder."""
        written, *_ = await self._all("publish", TenantPublish(tenant, str(folder), canary), TenantPublished)
        return Manifest(
            version, str(folder), written.fingerprint, canary, written.canary_logprobs, adapter=tenant, num_bytes=written.num_bytes)

    async def save(self, tenant: str, folder: Path) -> None:
        """Write all that a tenant's training needs to go on exactly."""
        await self._all("save", TenantFolder(tenant, str(folder)), Nothing)

    async def restore(self, tenant: str, folder: Path, *, optimizer: bool) -> None:
        """Go on from what `save` wrote, with its optimizer or with a fresh one."""
        restored, *_ = await self._all("restore", TenantRestore(tenant, str(folder), optimizer), TenantRestored)
        self.steps[tenant] = restored.step

    def _shares(self, lengths: np.ndarray) -> list[np.ndarray]:
        """Indices of each rank's sequences, balanced by tokens; a rank may get none."""
        num_ranks = len(self._workers)
        if num_ranks == 1 or len(lengths) == 0:
            return [np.arange(len(lengths)), *([np.zeros(0, np.int64)] * (num_ranks - 1))]
        return [np.sort(np.asarray(part, np.int64)) for part in partition(lengths.astype(np.float64), num_ranks).parts]

    async def _all(self, method: str, request: Any, reply: type[T]) -> list[T]:
        return await self._each(method, [request] * len(self._workers), reply)

    async def _each(self, method: str, requests: Sequence[Any], reply: type[T]) -> list[T]:
        patience_s = self._config.dist.sync_timeout_s
        async with self._turn:
            if self._failed:
                raise WorkerError(f"{method} was not begun: the train ranks have failed before, and have to be restarted")
            try:
                timeout_s = self._config.train.step_timeout_s + patience_s
                return await ask_all(self._workers, method, requests, reply, timeout_s=timeout_s, patience_s=patience_s)
            except RunError as exc:
                # A rank alone is in step with itself, unless it is still busy with what nobody waits for any more.
                self._failed = len(self._workers) > 1 or isinstance(exc, DeadlineError)
                raise
