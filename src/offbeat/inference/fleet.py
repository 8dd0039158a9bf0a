"""The engines as a cache of adapters: which engine holds which, what makes room for what, and which version of a tenant is current.

Publishing and generation for LoRA go through `AdapterFleet`; routing itself is the pool's. An adapter that a request wants and no engine in
service holds is loaded and proven first. All books are kept on the event loop: what is read and changed without an `await` between is one.
"""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self
from weakref import WeakValueDictionary

from offbeat.aio import deadline, gather_all
from offbeat.errors import DeadlineError, EngineError, OffbeatError, ProofError, PublishError, RefusedError
from offbeat.inference.pool import EnginePool
from offbeat.inference.sampling import Sample, Sampling
from offbeat.inference.shelf import Shelf, counted
from offbeat.types import Version
from offbeat.weights.adapters import AdapterManifest, split_adapter_name
from offbeat.weights.lora_fanout import FanoutReport, Installed, fan_out, install
from offbeat.weights.protocol import EngineControl
from offbeat.weights.publish import objection

_LOADS_AT_ONCE = 4
_PUBLISH_ROUNDS = 2
_UNLOAD_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Book:
    """A shelf with what orders the calls to its engine.

    Attributes:
        slots: loads at once.
        locks: one at a time loads or unloads an adapter.
    """

    shelf: Shelf
    slots: asyncio.Semaphore
    locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def lock(self, name: str) -> asyncio.Lock:
        return self.locks.setdefault(name, asyncio.Lock())


@dataclass(frozen=True)
class Wanted:
    """One adapter, for the pool; see `offbeat.inference.pool.WantedAdapter`."""

    fleet: "AdapterFleet"
    manifest: AdapterManifest

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def holders(self) -> Collection[str]:
        return self.fleet.holders(self.name)

    @asynccontextmanager
    async def using(self, engine: EngineControl) -> AsyncIterator[None]:
        async with self.fleet.holding(engine, self.manifest):
            yield

    async def verify(self, engine: EngineControl) -> None:
        await self.fleet.verify(engine, self.manifest)


class AdapterFleet:
    """Publishes and serves adapters on the engines of a pool. Use as `async with`; leaving cancels unloading that is under way."""

    def __init__(
        self,
        pool: EnginePool,
        *,
        capacity: int,
        tolerance: float,
        timeout_s: float,
        keep: int = 2,
        on_event: Callable[..., None] = lambda _kind, **_fields: None,
    ) -> None:
        """
        Args:
            capacity: adapters that an engine holds at once.
            tolerance: largest difference of the canary's mean log-probability between trainer and engine.
            timeout_s: for one engine to load and prove one adapter.
            keep: folders of each tenant's newest versions that stay, besides those in use.
            on_event: hears "fanout" (adapter, total_s, num_bytes, and by engine seconds, retries and the reason of a failure) of each
                publish, and "adapter_loaded" (engine, adapter, seconds) of each load outside of publishes.
        """
        self._pool = pool
        self._capacity = capacity
        self._tolerance = tolerance
        self._timeout_s = timeout_s
        self._keep = keep
        self._on_event = on_event
        self._books = {name: Book(Shelf(capacity), asyncio.Semaphore(min(_LOADS_AT_ONCE, capacity))) for name in pool.states}
        self._manifests: dict[str, AdapterManifest] = {}
        self._current: dict[str, str] = {}
        self._newest: dict[str, str] = {}
        self._requests: Counter[str] = Counter()
        self._chores: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)

    # -- publishing --------------------------------------------------------------------------------------------------------------------

    async def publish(self, manifest: AdapterManifest) -> FanoutReport:
        """Bring a tenant's new version to the engines; it is current from the first that serves it. Older versions leave as they drain.

        Raises:
            PublishError: no engine serves it, and none heals in time; each engine's reason. The tenant's older versions, and all other
                tenants, go on as before.
        """
        name, tenant = manifest.name, manifest.tenant
        newest = self._newest.get(tenant)
        if newest is not None and manifest.version <= _version(newest):
            raise PublishError(f"{name} is not newer than {newest}; a version is published once, and a tenant's versions count up")
        if newest is None and any(name in book.shelf.names for book in self._books.values()):
            raise PublishError(f"requests still use {name} of a removed tenant {tenant}; publish another version, or later")
        before = self._manifests.get(newest or "")
        manifest = replace(manifest, canary_before=before and before.canary_logprob)
        self._manifests[name], self._newest[tenant] = manifest, name
        try:
            for _ in range(_PUBLISH_ROUNDS):
                report = await self._fan_out(manifest)
                self._record(report, manifest)
                if report.serving or report.adapter_is_bad:
                    break
            return report.check()
        except EngineError as exc:
            raise PublishError(f"{name} could not be published: {exc}") from exc
        finally:
            if self._newest.get(tenant) == name and self._current.get(tenant) != name:
                self._withdraw(tenant, name)
            self._retire(tenant)
            self.prune()

    def _record(self, report: FanoutReport, manifest: AdapterManifest) -> None:
        engines = {
            name: {"seconds": round(d.seconds, 4), "retries": d.num_retries, "reason": d.reason} for name, d in report.deliveries.items()}
        self._on_event("fanout", adapter=manifest.name, total_s=round(report.total_s, 4), num_bytes=manifest.num_bytes, engines=engines)

    def remove(self, tenant: str) -> None:
        """Serve a tenant no more; requests in flight finish, and its folders stay."""
        self._current.pop(tenant, None)
        self._newest.pop(tenant, None)
        self._manifests = {name: manifest for name, manifest in self._manifests.items() if manifest.tenant != tenant}
        self._retire(tenant)

    def prune(self) -> None:
        """Remove the folders of versions that are not among a tenant's newest, and that no engine or request may read."""
        kept = {*self._requests, *self._newest.values(), *self._current.values()}
        kept = kept.union(*(book.shelf.names for book in self._books.values()))
        by_tenant: dict[str, list[str]] = {}
        for name in sorted(self._manifests, key=_version):
            by_tenant.setdefault(self._manifests[name].tenant, []).append(name)
        for name in [name for names in by_tenant.values() for name in names[: -self._keep] if name not in kept]:
            shutil.rmtree(self._manifests.pop(name).folder, ignore_errors=True)  # what is gone already needs no removal

    async def _fan_out(self, manifest: AdapterManifest) -> FanoutReport:
        """Bring an adapter to engines once; raises EngineError while too few are healthy."""
        engines = await self._pool.wait_healthy()
        targets = self._targets(manifest.tenant, engines)
        with ExitStack() as stack:
            for target in targets:  # now: others that choose engines have to see it
                stack.enter_context(counted(self._books[target].shelf.coming, manifest.name))
            return await fan_out(
                manifest.name, [engines[target] for target in targets],
                partial(self._install, manifest=manifest, patience_s=self._timeout_s / 2), timeout_s=self._timeout_s,
                num_bytes=manifest.num_bytes, on_serving=self._serves, on_failed=self._pool.quarantine)

    def _targets(self, tenant: str, engines: Collection[str]) -> list[str]:
        """Engines for a new version: those that hold the tenant's last, then those with the fewest tenants."""
        tenants = {engine: {_tenant(name) for name in self._books[engine].shelf.names} for engine in engines}
        ranked = sorted(engines, key=lambda engine: (tenant not in tenants[engine], len(tenants[engine])))
        return ranked[: self._num_replicas]

    @property
    def _num_replicas(self) -> int:
        """Engines per tenant, so that an old and a new version of every tenant fit."""
        return max(len(self._books) * self._capacity // (2 * max(len(self._newest), 1)), 1)

    def _serves(self, _engine: str, name: str) -> None:
        if name in self._manifests:  # its tenant has not been removed
            for known in (self._current, self._newest):
                known[_tenant(name)] = max(known.get(_tenant(name), name), name, key=_version)

    def _withdraw(self, tenant: str, name: str) -> None:
        """A version that no engine serves was not published."""
        del self._manifests[name]
        if tenant in self._current:
            self._newest[tenant] = self._current[tenant]
        else:
            del self._newest[tenant]

    def _retire(self, tenant: str) -> None:
        """Unload every version of the tenant but the current one, each as soon as no request uses it."""
        for engine, book in self._books.items():
            book.shelf.leaving |= {name for name in book.shelf.held if _tenant(name) == tenant and name != self._current.get(tenant)}
            self._unload_drained(engine)

    # -- generation --------------------------------------------------------------------------------------------------------------------

    async def generate(self, adapter: str, prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        """n continuations by a tenant's current version, or by the version that `tenant@version` names; see `EnginePool.generate`.

        Raises:
            RefusedError: there is no such adapter, or its folder cannot be loaded.
        """
        name = self._current.get(adapter, adapter)
        manifest = self._manifests.get(name)
        if manifest is None:
            current = self._current.get(adapter.rpartition("@")[0])  # other tenants' names are no business of this one
            raise RefusedError(f"there is no adapter {adapter[:200]!r}; {f'{current} is current' if current else 'publish it first'}")
        with counted(self._requests, name):
            return await self._pool.generate(prompt, sampling, n=n, session=session, adapter=Wanted(self, manifest))

    def current(self, tenant: str) -> str | None:
        """The name of a tenant's current version."""
        return self._current.get(tenant)

    def holders(self, name: str) -> list[str]:
        """Engines in service that hold an adapter; while there is none, those that are about to."""
        shelves = {engine: self._books[engine].shelf for engine in self._pool.healthy}
        return [e for e, shelf in shelves.items() if name in shelf.held] or [e for e, shelf in shelves.items() if name in shelf.coming]

    @asynccontextmanager
    async def holding(self, engine: EngineControl, manifest: AdapterManifest) -> AsyncIterator[None]:
        """Let an engine hold an adapter while the body runs, loaded and proven there first if need be.

        Raises:
            EngineError: it could not be loaded in time.
        """
        shelf, name, start = self._books[engine.name].shelf, manifest.name, time.monotonic()
        if name not in shelf.held:
            try:
                await self._install(engine, manifest=manifest)
            except DeadlineError as exc:
                raise EngineError(str(exc)) from exc
            self._on_event("adapter_loaded", engine=engine.name, adapter=name, seconds=round(time.monotonic() - start, 3))
        shelf.put(name)
        try:
            with counted(shelf.in_use, name):
                yield
        finally:
            self._unload_drained(engine.name)

    async def verify(self, engine: EngineControl, manifest: AdapterManifest) -> None:
        """Have an engine prove an adapter that it should hold; if it cannot, the books say so from now."""
        book = self._books[engine.name]
        async with book.lock(manifest.name):
            try:
                proof = await engine.prove(manifest.canary, timeout_s=self._timeout_s, adapter=manifest.name)
                holds = not objection(manifest, proof, self._tolerance)
            except OffbeatError:
                holds = False
            if not holds:
                book.shelf.take_out(manifest.name)

    # -- healing -----------------------------------------------------------------------------------------------------------------------

    def forget(self, engine: str) -> None:
        """The engine's adapters are gone."""
        shelf = self._books[engine].shelf
        shelf.held.clear()
        shelf.leaving.clear()

    async def refill(self, engine: EngineControl) -> None:
        """Load the newest versions on an engine that is out of service and holds nothing for certain; nothing is missing when this returns.

        An adapter that this engine refuses is left out if no other engine in service holds it either.

        Raises:
            EngineError, DeadlineError: the engine failed, or it refuses what another one serves.
        """
        self.forget(engine.name)
        bad: set[str] = set()

        async def load(manifest: AdapterManifest) -> None:
            try:
                await self._install(engine, manifest=manifest, patience_s=self._timeout_s / 2)
            except (RefusedError, ProofError):
                if self._num_serving(manifest.name):
                    raise
                bad.add(manifest.name)

        while missing := self._missing(engine.name, bad):
            await gather_all(load(manifest) for manifest in missing)

    def _missing(self, engine: str, bad: Collection[str]) -> list[AdapterManifest]:
        shelf = self._books[engine].shelf
        missing = [self._manifests[name] for name in self._newest.values()
                   if name not in shelf.held and name not in bad and self._num_serving(name) < self._num_replicas]
        return missing[: max(self._capacity - len(shelf.held), 0)]

    def _num_serving(self, name: str) -> int:
        return sum(name in self._books[engine].shelf.held for engine in self._pool.healthy)

    # -- loading and unloading ---------------------------------------------------------------------------------------------------------

    async def _install(self, engine: EngineControl, *, manifest: AdapterManifest, patience_s: float = 0.0) -> Installed:
        """Load and prove an adapter where it is not held yet."""
        book, name = self._books[engine.name], manifest.name
        shelf = book.shelf

        async def make_room() -> None:
            for victim in shelf.make_room():
                await self._unload(engine, victim)

        async with deadline(f"loading {name} on {engine.name}", self._timeout_s):
            with counted(shelf.coming, name):
                async with book.lock(name):
                    if name in shelf.held:
                        return Installed()
                    async with book.slots:
                        with shelf.loading():
                            installed = await install(
                                engine, manifest, tolerance=self._tolerance, timeout_s=self._timeout_s, patience_s=patience_s,
                                make_room=make_room)
                        shelf.put(name)
                        return installed

    def _unload_drained(self, engine: str) -> None:
        control = self._pool.healthy.get(engine)
        if control is None:  # it is forgotten before it returns
            return
        for name in self._books[engine].shelf.drained():
            chore = asyncio.create_task(self._unload_beside(control, name), name=f"unload {name} on {engine}")
            self._chores.add(chore)
            chore.add_done_callback(self._chores.discard)

    async def _unload_beside(self, engine: EngineControl, name: str) -> None:
        with suppress(OffbeatError):  # nobody is sent there; an engine that fails this fails its probe, too
            await self._unload(engine, name)

    async def _unload(self, engine: EngineControl, name: str) -> None:
        book = self._books[engine.name]
        async with book.lock(name):
            if name not in book.shelf.held:  # it may have been wanted again
                await engine.unload_adapter(name, timeout_s=_UNLOAD_TIMEOUT_S)


def _tenant(name: str) -> str:
    return split_adapter_name(name)[0]


def _version(name: str) -> Version:
    return split_adapter_name(name)[1]
