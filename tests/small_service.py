"""The service's core on real ranks and engines with the smallest model, for tests: one set of processes, any number of services on it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.algorithms.adam import AdamParams
from offbeat.algorithms.objectives import CROSS_ENTROPY
from offbeat.config.root import Config
from offbeat.data.batch import Batch
from offbeat.runs.adapters import Adapters, open_adapters
from offbeat.service.base_models import BaseModels
from offbeat.service.futures import Futures
from offbeat.service.incidents import Incidents
from offbeat.service.limits import Limits, Usage
from offbeat.service.results import Results
from offbeat.service.service import ServiceCore, ServiceSettings
from offbeat.service.store import Store
from offbeat.service.types import Caller, Layout, LoraSpec, Outcome, Payload, Pending, TrainingData
from offbeat.telemetry.record import SilentRecord
from small_run import small_config

ALICE, BOB = Caller("alice"), Caller("bob")
LORA = LoraSpec(rank=4, alpha=8.0, seed=1)
STEP = AdamParams(lr=1e-2)
BASE = "org/small"


def training_data(seed: int, *, num: int = 3, length: int = 8, weight: float = 1.0) -> TrainingData:
    """Random datums that are to predict random tokens."""
    rng = np.random.default_rng(seed)
    total = num * length
    batch = Batch(
        tokens=rng.integers(5, 15, total), offsets=np.arange(num + 1) * length, positions=np.arange(total),
        targets=rng.integers(5, 15, total), columns={"loss_weights": np.full(total, weight)},
        sequences={"group_ids": np.arange(num), "prefix_lens": np.zeros(num)}, losses=(CROSS_ENTROPY,))
    return TrainingData(batch, (Layout((length,)),) * num)


@dataclass
class Open:
    """A service that runs, and how its clients use it."""

    service: ServiceCore
    store: Store
    usage: Usage
    answers: dict[bytes, Outcome]
    incidents: Incidents

    async def outcome(self, request_id: str, caller: Caller = ALICE) -> Outcome:
        """Wait for a request as a client does."""
        async with asyncio.timeout(180):
            while isinstance(answer := await self.service.retrieve(caller, request_id, timeout_s=20), Pending):
                pass
        return self.answers[answer.data]

    async def model(self, caller: Caller = ALICE, *, session_id: str = "", seq: int = 0, lora: LoraSpec = LORA) -> "Client":
        """A fresh model, in a session of its own unless one is given."""
        session_id = session_id or await self.service.create_session(caller, metadata={}, tags=(), display_name="")
        request = await self.service.create_model(
            caller, session_id=session_id, model_seq_id=seq, base_model=BASE, lora=lora, metadata={})
        await self.outcome(request, caller)
        return Client(self, caller, request.removesuffix(":create"))


@dataclass
class Client:
    """One model's client, which numbers its requests; each method sends one and gives its id."""

    open: Open
    caller: Caller
    model_id: str
    seq: int = 0

    async def outcome(self, request_id: str) -> Outcome:
        return await self.open.outcome(request_id, self.caller)

    async def both(self, *requests: Awaitable[str]) -> list[Outcome]:
        """Send requests one after the other, then wait for all."""
        return [await self.outcome(request_id) for request_id in [await request for request in requests]]

    def next(self) -> int:
        self.seq += 1
        return self.seq

    def learn(self, data: TrainingData, *, forward_only: bool = False) -> Awaitable[str]:
        return self.open.service.forward_backward(
            self.caller, model_id=self.model_id, seq_id=self.next(), data=data, forward_only=forward_only)

    def step(self, params: AdamParams = STEP) -> Awaitable[str]:
        return self.open.service.optim_step(self.caller, model_id=self.model_id, seq_id=self.next(), params=params)

    def save(self, name: str | None, *, ttl_s: float | None = None, overwrite: bool = False) -> Awaitable[str]:
        return self.open.service.save_weights(
            self.caller, model_id=self.model_id, seq_id=self.next(), name=name, ttl_s=ttl_s, overwrite=overwrite, metadata={})

    def load(self, path: str, *, optimizer: bool = True) -> Awaitable[str]:
        return self.open.service.load_weights(
            self.caller, model_id=self.model_id, seq_id=self.next(), path=path, optimizer=optimizer)

    async def resumed(self, path: str, *, optimizer: bool = True, seq: int = 1) -> "Client":
        """Another model of the same session, which begins with a checkpoint."""
        request = await self.open.service.create_from_weights(
            self.caller, session_id=self.model_id.partition(":")[0], model_seq_id=seq, path=path, optimizer=optimizer, base_model=None,
            metadata={})
        return Client(self.open, self.caller, request.removesuffix(":create"))

    def sampler(self, name: str | None = None, *, number: int | None = None) -> Awaitable[str]:
        return self.open.service.save_for_sampler(
            self.caller, model_id=self.model_id, seq_id=self.next(), name=name, sampling_session_seq_id=number, ttl_s=None, metadata={})

    def export(self, name: str, *, recipients: tuple[str, ...] = ()) -> Awaitable[str]:
        return self.open.service.save_external(
            self.caller, model_id=self.model_id, seq_id=self.next(), name=name, ttl_s=None, recipients=recipients)


@dataclass
class SmallCluster:
    """Ranks and engines that run."""

    config: Config
    runner: asyncio.Runner
    adapters: Adapters
    answers: dict[bytes, Outcome] = field(default_factory=dict)

    def run(self, body: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a test's body."""
        self.runner.run(body())

    def _encode(self, outcome: Outcome) -> Payload:
        key = str(len(self.answers)).encode()
        self.answers[key] = outcome
        return Payload("test", key)

    @asynccontextmanager
    async def open(
        self, folder: Path, *, limits: Limits | None = None, settings: ServiceSettings | None = None, graceful: bool = True,
    ) -> AsyncIterator[Open]:
        """A service on a data folder, new or used before; in the end it is closed gracefully, or else just gone as by kill -9."""
        store = Store.open(f"sqlite:///{folder / 'service.db'}")
        usage, incidents = Usage(lambda _: limits or Limits()), Incidents()
        base_models, events = BaseModels.of(BASE, self.config.serve), self.adapters.fleet.record.events
        events.listeners.append(incidents.hear)
        service: ServiceCore | None = None
        futures = Futures(
            store, Results(folder / "results"), encode=self._encode,
            owner_of=lambda session_id: service.sessions.owner_of(session_id) if service else None, usage=usage)
        service = ServiceCore(
            self.adapters, base_models, store, futures, folder=folder, settings=settings or ServiceSettings(patience_s=0.5))
        work = asyncio.create_task(service.run())
        try:
            yield Open(service, store, usage, self.answers, incidents)
            if graceful:
                await service.close()
                await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            store.close()
            events.listeners.remove(incidents.hear)
            for name in self.adapters.names if self.adapters.trainers_alive else ():
                await self.adapters.remove(name)


@contextmanager
def small_cluster(root: Path, model_dir: str, **settings: str) -> Iterator[SmallCluster]:
    """Start two ranks and an engine."""
    config = small_config(root, model_dir, **{
        "model__lora__rank": "8", "inference__num_engines": "1", "train__num_ranks": "2", "inference__probe_interval_s": "0.3", **settings})
    (config.run_dir / "logs").mkdir(parents=True)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        adapters = runner.run(stack.enter_async_context(open_adapters(config, SilentRecord(config.run_dir))))
        yield SmallCluster(config, runner, adapters)
        runner.run(stack.aclose())
