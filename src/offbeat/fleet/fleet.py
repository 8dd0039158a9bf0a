"""Brings together the engines of a run: their pool, the adapters on them, requests, publishes and healing.

The controller opens it, and so do rank 0 in SPMD mode and processes that train and serve many adapters; other ranks of SPMD mode open a
pool alone. Torch-free.
"""

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from offbeat.aio import HaltingClock, gather_all, run_beside
from offbeat.config.for_processes import EngineConfig
from offbeat.config.inference import InferenceConfig
from offbeat.errors import ConfigError, EngineError, OffbeatError
from offbeat.fleet.adapters import AdapterCache
from offbeat.fleet.dispatch import Dispatcher
from offbeat.fleet.engine_group import EngineAddresses, EngineGroup
from offbeat.fleet.health import Healer
from offbeat.fleet.kinds import MAKERS
from offbeat.fleet.listener import FleetRecord, HealingRecord
from offbeat.fleet.owner import leaving
from offbeat.fleet.pool import EnginePool, ProcessTimes
from offbeat.fleet.publishers import AdapterPublisher
from offbeat.inference.client import EngineClient, EngineSession, deliver_nothing
from offbeat.telemetry.record import RunRecord
from offbeat.types import Version
from offbeat.weights.adapters import is_policy
from offbeat.weights.proof import ProofJudge

UNPUBLISHED: Version = -1
"""Version of a new engine until its first publication: the initial weights, unproven, to which no request goes."""

Reload = Callable[[EngineClient], Awaitable[Version | None]]
"""Brings an engine to the current weights and adapters, and returns the version of its whole weights; see `Healer`."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Engines in service; `engines` has the processes that this run has started, none where it only uses engines of others."""

    engines: EngineGroup
    pool: EnginePool
    adapters: AdapterCache
    dispatcher: Dispatcher
    publisher: AdapterPublisher
    judge: ProofJudge
    addresses: EngineAddresses
    config: EngineConfig
    record: RunRecord

    async def watch(self, reload: Reload | None = None) -> None:
        """Until cancelled, quarantine engines that die or hang, and heal them by `reload`, which refills adapters by default."""
        healer = Healer(
            self.pool, reload=reload or self.adapters.refill, restart=self._restart if self.engines.workers else None,
            probe_interval_s=self.config.inference.probe_interval_s, probe_timeout_s=self.config.inference.probe_timeout_s,
            listener=HealingRecord(self.record))
        await run_beside(healer.run(), self.engines.watch(self.pool.quarantine))

    async def unload_leftovers(self, directory: Path) -> None:
        """Unload the adapters that earlier starts of this run have published below `directory` from engines by URL."""

        async def unload(client: EngineClient) -> None:
            try:
                for name, folder in (await client.adapters(timeout_s=self.config.inference.probe_timeout_s)).items():
                    if is_policy(name) and Path(folder).is_relative_to(directory):
                        await client.unload_adapter(name, timeout_s=self.config.weights.stage_timeout_s)
                        self.record.events.record("leftover", engine=client.name, adapter=name)
            except OffbeatError as exc:
                self.pool.quarantine(client.name, f"it cannot forget what the run has left in it: {exc}")

        if not self.engines.workers:
            await gather_all(unload(self.pool.client(name)) for name in self.pool.states)

    async def _restart(self, name: str) -> str:
        self.judge.forget(name)
        return await self.engines.restart(name)


async def open_engines(
    stack: AsyncExitStack, engines: EngineGroup, config: EngineConfig, record: RunRecord, *, model: str, tokenizer: str,
) -> Fleet:
    """Have the engines of a run load `model` with the tokenizer of the folder `tokenizer`, and bring them together; see `open_fleet`."""
    addresses = await engines.serve(model=model, tokenizer=tokenizer, version=UNPUBLISHED)
    return await open_fleet(stack, engines, addresses, config, record, model=model)


async def open_fleet(
    stack: AsyncExitStack, engines: EngineGroup, addresses: EngineAddresses, config: EngineConfig, record: RunRecord, *, model: str,
) -> Fleet:
    """Connect to the engines at these addresses, which have to serve `model`.

    Raises:
        ConfigError: an engine by URL is not ready, serves another model, or lacks a feature that the run needs.
    """
    pool = await open_pool(stack, addresses, config, record, model=model, engines=engines)
    if addresses.owner:
        stack.push_async_callback(_leave, pool, addresses.owner, timeout_s=config.inference.probe_timeout_s)
    judge = ProofJudge.of(config.weights.proof_tolerance, config.canary_dtype, config.inference.quantization, config.model.quantization)
    adapters = await stack.enter_async_context(AdapterCache(
        pool, capacity=config.inference.max_adapters, judge=judge, timeout_s=config.weights.stage_timeout_s, keep=config.weights.keep))
    dispatcher = make_dispatcher(pool, config.inference, adapters=adapters)
    publisher = AdapterPublisher(pool, adapters)
    return Fleet(
        engines=engines, pool=pool, adapters=adapters, dispatcher=dispatcher, publisher=publisher, judge=judge, addresses=addresses,
        config=config, record=record)


async def open_pool(
    stack: AsyncExitStack, addresses: EngineAddresses, config: EngineConfig, record: RunRecord, *, model: str,
    engines: EngineGroup | None = None,
) -> EnginePool:
    """Connect to the engines at these addresses; see `open_fleet`. `engines` are None in a process that has not started them."""
    deliver = engines.deliver if engines else deliver_nothing
    http = await stack.enter_async_context(EngineSession())
    dialect, inference, clock = MAKERS[config.inference.engine].dialect(config, model), config.inference, HaltingClock()
    clients = [
        EngineClient(
            name, url, http.session, dialect=dialect, api_key=addresses.key, deliver=deliver, clock=clock, owner=addresses.owner)
        for name, url in addresses.urls.items()]
    if inference.urls:
        await gather_all(_check(client, timeout_s=inference.start_timeout_s) for client in clients)
    return make_pool(
        clients, record, probe_timeout_s=inference.probe_timeout_s, min_engines=inference.min_engines,
        heal_timeout_s=inference.heal_timeout_s, clock=clock, processes=engines)


def make_pool(
    clients: Iterable[EngineClient], record: RunRecord, *, probe_timeout_s: float, heal_timeout_s: float, min_engines: int = 1,
    clock: HaltingClock | None = None, processes: ProcessTimes | None = None,
) -> EnginePool:
    """Make a pool whose listener is a run's record; see `EnginePool`."""
    return EnginePool(
        clients, probe_timeout_s=probe_timeout_s, min_engines=min_engines, heal_timeout_s=heal_timeout_s,
        listener=FleetRecord(record), clock=clock, processes=processes)


def make_dispatcher(pool: EnginePool, inference: InferenceConfig, *, adapters: AdapterCache | None = None) -> Dispatcher:
    """Make a dispatcher for the engines of a pool with the timeouts of [inference]."""
    return Dispatcher(pool, request_timeout_s=inference.request_timeout_s, token_timeout_s=inference.token_timeout_s, adapters=adapters)


async def _leave(pool: EnginePool, owner: str, *, timeout_s: float) -> None:
    """Tell engines by URL that the run has ended, so that another one can begin at once."""

    async def leave(client: EngineClient) -> None:
        with suppress(OffbeatError):
            await client.leave(leaving(owner), timeout_s=timeout_s)

    await gather_all(leave(pool.client(name)) for name in pool.states)


async def _check(client: EngineClient, *, timeout_s: float) -> None:
    try:
        await client.check(timeout_s=timeout_s)
    except EngineError as exc:
        raise ConfigError(f"inference.urls names {client.url}, but {exc}") from exc
