"""All ranks that train tenants' adapters, as one trainer. Torch-free.

A pass may hold sequences of any of the tenants; what it adds to one tenant's gradient does not depend on the others. Calls are made one
after the other, in the same order on every rank.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import numpy as np

from offbeat.algorithms.adam import AdamParams
from offbeat.cluster.group import Launcher, Nothing, Worker, ask_all
from offbeat.cluster.messages import BuildRequest
from offbeat.cluster.ranks import start_ranks
from offbeat.cluster.tenant_messages import (
    TenantFolder,
    TenantName,
    TenantPass,
    TenantPublish,
    TenantPublished,
    TenantsDiscard,
    TenantShard,
    TenantStart,
    TenantsUpdate,
    TenantsUpdated,
)
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.root import Config
from offbeat.data.balance import partition
from offbeat.data.batch import TokenBatch
from offbeat.telemetry.tracker import combine
from offbeat.types import Version
from offbeat.weights.adapters import AdapterManifest

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
    """R ranks that train many adapters on one base model."""

    def __init__(self, workers: Sequence[Worker], config: Config) -> None:
        self._workers = workers
        self._config = config
        self._turn = asyncio.Lock()
        self._tenants: set[str] = set()

    @classmethod
    async def start(cls, launcher: Launcher, config: Config, *, model: str, build: BuildRequest | None, log_dir: Path) -> Self:
        """Start all ranks and wait until they have met and loaded the model."""
        target = "offbeat.cluster.tenant_worker:TenantWorker"
        return cls(await start_ranks(launcher, config, target, model=model, build=build, log_dir=log_dir), config)

    async def add(self, tenant: str, *, rank: int, alpha: float, seed: int, folder: str = "") -> None:
        """Give a tenant an adapter: a fresh one, or one that goes on from a PEFT folder."""
        await self._all("add", TenantStart(tenant, rank, alpha, seed, folder), Nothing)
        self._tenants.add(tenant)

    async def remove(self, tenant: str) -> None:
        """Forget a tenant."""
        await self._all("remove", TenantName(tenant), Nothing)
        self._tenants.discard(tenant)

    async def learn(
        self, batch: TokenBatch, tenants: Sequence[str], *, objective: Literal["ppo", "sft"], algorithm: AlgorithmConfig,
    ) -> Passed:
        """Score sequences, each under its tenant's adapter, and add their gradients to those that the tenants have gathered.

        Args:
            tenants: [N], of each sequence; loss weights are normalised by tenant.
        """
        try:
            return await self._run(batch, tenants, objective, algorithm, learn=True)
        except BaseException:  # another rank may have added its part
            await self._all("discard", TenantsDiscard(tuple(sorted(set(tenants) & self._tenants))), Nothing)
            raise

    async def score(self, batch: TokenBatch, tenants: Sequence[str]) -> np.ndarray:
        """[T] float32 log-probabilities of the tokens in the loss mask, each sequence under its tenant's adapter, 0 on others."""
        return (await self._run(batch, tenants, "sft", AlgorithmConfig(), learn=False)).logprobs

    async def _run(
        self, batch: TokenBatch, tenants: Sequence[str], objective: str, algorithm: AlgorithmConfig, *, learn: bool,
    ) -> Passed:
        shares = self._shares(batch)
        shards = [
            TenantShard(batch.select(share), tuple(str(tenants[i]) for i in share), objective, algorithm.model_dump_json(), learn)
            for share in shares]
        answers = await self._each("run", shards, TenantPass)
        logprobs = np.zeros(batch.num_tokens, np.float32)
        for share, answer in zip(shares, answers, strict=True):
            lengths = batch.lengths[share]
            where = np.repeat(batch.offsets[share] - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
            logprobs[where] = answer.logprobs
        parts = {tenant: [answer.stats[tenant] for answer in answers if tenant in answer.stats] for tenant in sorted(set(tenants))}
        return Passed(logprobs, {tenant: combine(own).values() for tenant, own in parts.items() if own})

    async def update(self, params: Mapping[str, AdamParams]) -> dict[str, float]:
        """One optimizer step for each tenant named; norms of their gradients, not finite where the update was left out."""
        updated, *_ = await self._all("update", TenantsUpdate(dict(params)), TenantsUpdated)
        return updated.grad_norms

    async def publish(self, tenant: str, version: Version, folder: Path, *, canary: tuple[int, ...]) -> AdapterManifest:
        """Write a tenant's adapter into a new PEFT folder."""
        written, *_ = await self._all("publish", TenantPublish(tenant, str(folder), canary), TenantPublished)
        return AdapterManifest(tenant, version, str(folder), written.fingerprint, canary, written.canary_logprob, written.num_bytes)

    async def save(self, tenant: str, folder: Path) -> None:
        """Write all that a tenant's training needs to go on exactly."""
        await self._all("save", TenantFolder(tenant, str(folder)), Nothing)

    async def restore(self, tenant: str, folder: Path) -> None:
        """Go on from what `save` wrote."""
        await self._all("restore", TenantFolder(tenant, str(folder)), Nothing)
        self._tenants.add(tenant)

    def _shares(self, batch: TokenBatch) -> list[np.ndarray]:
        """Indices of each rank's sequences, balanced by tokens; a rank may get none."""
        num_ranks = len(self._workers)
        if num_ranks == 1 or len(batch) == 0:
            return [np.arange(len(batch)), *([np.zeros(0, np.int64)] * (num_ranks - 1))]
        return [np.sort(np.asarray(part, np.int64)) for part in partition(batch.lengths.astype(np.float64), num_ranks).parts]

    async def _all(self, method: str, request: Any, reply: type[T]) -> list[T]:
        return await self._each(method, [request] * len(self._workers), reply)

    async def _each(self, method: str, requests: Sequence[Any], reply: type[T]) -> list[T]:
        patience_s = self._config.train.step_timeout_s + self._config.dist.sync_timeout_s
        async with self._turn:
            return await ask_all(self._workers, method, requests, reply, timeout_s=patience_s)
