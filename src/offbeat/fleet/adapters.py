"""The engines as a cache of adapters: which engine holds which, and what makes room for what.

Publishing, generation and scoring for LoRA go through `AdapterFleet`; routing itself is the pool's, and which versions there are the
catalog's. An adapter that a request wants and no engine in service holds is loaded and proven first. All books are kept on the event loop:
what is read and changed without an `await` between is one.
"""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Self

from offbeat.aio import deadline, gather_all
from offbeat.errors import DeadlineError, EngineError, OffbeatError, ProofError, PublishError, RefusedError
from offbeat.fleet.catalog import Catalog, tenant_of
from offbeat.fleet.pool import EnginePool
from offbeat.fleet.slots import Book, Shelf, counted
from offbeat.inference.sampling import Draws, PromptScore, Sample, Sampling
from offbeat.types import Version
from offbeat.weights.adapters import AdapterManifest
from offbeat.weights.lora_fanout import FanoutReport, Installed, fan_out, install
from offbeat.weights.proof import Judge
from offbeat.weights.protocol import EngineControl

_LOADS_AT_ONCE = 4
_PUBLISH_ROUNDS = 2
_UNLOAD_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Wanted:
    """One adapter, for the pool; see `offbeat.fleet.pool.WantedAdapter`."""

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
        judge: Judge,
        timeout_s: float,
        keep: int = 2,
        on_event: Callable[..., None] = lambda _kind, **_fields: None,
    ) -> None:
        """
        Args:
            capacity: adapters that an engine holds at once.
            judge: says what engines' proofs are worth.
            timeout_s: for one engine to load and prove one adapter.
            keep: folders of each tenant's newest versions that stay, besides those in use.
            on_event: hears "fanout" (adapter, total_s, num_bytes, and by engine seconds, retries and the reason of a failure) of each
                publish, and "adapter_loaded" (engine, adapter, seconds) or "load_failed" (engine, adapter, reason) of each load outside of
                publishes.
        """
        self._pool = pool
        self._capacity = capacity
        self._judge = judge
        self._timeout_s = timeout_s
        self._on_event = on_event
        self._books = {name: Book(Shelf(capacity), asyncio.Semaphore(min(_LOADS_AT_ONCE, capacity))) for name in pool.states}
        self._catalog = Catalog(keep=keep)
        self._base: tuple[tuple[int, ...], tuple[float, ...]] | None = None
        self._requests: Counter[str] = Counter()
        self._chores: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)

    # -- publishing --------------------------------------------------------------------------------------------------------------------

    async def publish(self, manifest: AdapterManifest, *, pinned: bool = False) -> FanoutReport:
        """Bring a tenant's new version to the engines; it is current from the first that serves it. Older versions leave as they drain.

        Args:
            pinned: as by `pin`, from now on; it may then be older than others of its tenant.

        Raises:
            PublishError: no engine serves it, and none heals in time; each engine's reason. The tenant's older versions, and all other
                tenants, go on as before.
        """
        name, was_known = manifest.name, self._catalog.get(manifest.name) is not None
        self._check_unused(name)
        self._catalog.publish(manifest, pinned=pinned)
        try:
            for _ in range(_PUBLISH_ROUNDS):
                report = await self._fan_out(manifest)
                self._record(report, manifest)
                if report.serving or report.adapter_is_bad:
                    break
            return report.check()
        except BaseException as exc:
            if not was_known:
                self._catalog.withdraw(name)
            if isinstance(exc, EngineError):
                raise PublishError(f"{name} could not be published: {exc}") from exc
            raise
        finally:
            self._retire(manifest.tenant)
            self.prune()

    def pin(self, manifest: AdapterManifest) -> None:
        """Know a version until it is unpinned, its folder included, whatever its tenant publishes or has published.

        No engine is asked: one loads and proves it before the first request goes there, and again whenever it has made room meanwhile.

        Raises:
            PublishError: the name stands for another version, or did and is still in use.
        """
        self._check_unused(manifest.name)
        self._catalog.pin(manifest)

    def unpin(self, name: str) -> None:
        """Serve a version no more, also if it is its tenant's current one; requests in flight finish, and its folder stays."""
        self._catalog.unpin(name)
        self._judge.forget_tenant(tenant_of(name))
        self._retire(tenant_of(name))

    def _check_unused(self, name: str) -> None:
        """A name must not stand for something else than what engines still hold under it."""
        if self._catalog.get(name) is None and any(name in book.shelf.names for book in self._books.values()):
            raise PublishError(f"requests still use {name} of a removed tenant {tenant_of(name)}; publish another version, or later")

    def _record(self, report: FanoutReport, manifest: AdapterManifest) -> None:
        engines = {
            name: {"seconds": round(d.seconds, 4), "retries": d.num_retries, "reason": d.reason} for name, d in report.deliveries.items()}
        self._on_event("fanout", adapter=manifest.name, total_s=round(report.total_s, 4), num_bytes=manifest.num_bytes, engines=engines)

    def remove(self, tenant: str) -> None:
        """Serve what a tenant has published no more; requests in flight finish, its folders stay, and so do versions that are pinned."""
        self._catalog.remove(tenant)
        self._judge.forget_tenant(tenant)
        self._retire(tenant)

    def prune(self) -> None:
        """Remove the folders of versions that are not among a tenant's newest, nor pinned, and that no engine or request may read."""
        for folder in self._catalog.prune({*self._requests}.union(*(book.shelf.names for book in self._books.values()))):
            shutil.rmtree(folder, ignore_errors=True)  # what is gone already needs no removal

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
                num_bytes=manifest.num_bytes, on_serving=lambda _engine, name: self._catalog.serves(name), on_failed=self._pool.quarantine)

    def _targets(self, tenant: str, engines: Collection[str]) -> list[str]:
        """Engines for a new version: those that hold the tenant's last, then those with the fewest tenants."""
        tenants = {engine: {tenant_of(name) for name in self._books[engine].shelf.names} for engine in engines}
        ranked = sorted(engines, key=lambda engine: (tenant not in tenants[engine], len(tenants[engine])))
        return ranked[: self._num_replicas]

    @property
    def _num_replicas(self) -> int:
        """Engines per tenant, so that an old and a new version of every tenant fit."""
        return max(len(self._books) * self._capacity // (2 * max(self._catalog.num_tenants, 1)), 1)

    def _retire(self, tenant: str) -> None:
        """Unload every version of the tenant that is neither current nor pinned, each as soon as no request uses it."""
        for engine, book in self._books.items():
            book.shelf.leaving |= {name for name in book.shelf.held if tenant_of(name) == tenant and self._catalog.may_go(name)}
            self._unload_drained(engine)

    # -- generation --------------------------------------------------------------------------------------------------------------------

    async def generate(
        self, adapter: str, prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "", max_failures: int | None = None,
    ) -> list[Sample]:
        """n continuations by a tenant's current version, by the version that `tenant@version` names, or by the base model for "".

        See `EnginePool.generate`; the base model takes `serve_base` before.

        Raises:
            RefusedError: there is no such adapter, or its folder cannot be loaded.
        """
        with self._wanting(adapter) as wanted:
            return await self._pool.generate(prompt, sampling, n=n, session=session, adapter=wanted, max_failures=max_failures)

    async def score(
        self, adapter: str, tokens: tuple[int, ...], *, top_k: int = 0, targets: tuple[tuple[int, ...], ...] | None = None,
        draws: Draws | None = None, session: str = "", max_failures: int | None = None,
    ) -> PromptScore:
        """What an adapter, or the base model, says of tokens; see `generate` and `ScoreRequest`."""
        with self._wanting(adapter) as wanted:
            return await self._pool.score(
                tokens, top_k=top_k, targets=targets, draws=draws, session=session, adapter=wanted, max_failures=max_failures)

    @contextmanager
    def _wanting(self, adapter: str) -> Iterator[Wanted | None]:
        """The adapter for the pool, None for the base model; its folder stays while the body runs."""
        if not adapter:
            yield None
            return
        manifest = self._catalog.find(adapter)
        with counted(self._requests, manifest.name):
            yield Wanted(self, manifest)

    def current(self, tenant: str) -> str | None:
        """The name of a tenant's current version."""
        return self._catalog.current(tenant)

    @property
    def held(self) -> Mapping[str, list[str]]:
        """Adapters that every engine holds, the least recently used first."""
        return {engine: list(book.shelf.held) for engine, book in self._books.items()}

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
            except OffbeatError as exc:
                self._on_event("load_failed", engine=engine.name, adapter=name, reason=str(exc))
                if isinstance(exc, DeadlineError):
                    raise EngineError(str(exc)) from exc
                raise
            self._on_event("adapter_loaded", engine=engine.name, adapter=name, seconds=round(time.monotonic() - start, 3))
        shelf.put(name)
        try:
            with counted(shelf.in_use, name):
                yield
        finally:
            if self._catalog.get(name) is None and name in shelf.held:  # forgotten while it was loaded
                shelf.leaving.add(name)
            self._unload_drained(engine.name)

    async def verify(self, engine: EngineControl, manifest: AdapterManifest) -> None:
        """Have an engine prove an adapter that it should hold; if it cannot, the books say so from now."""
        book = self._books[engine.name]
        async with book.lock(manifest.name):
            try:
                proof = await engine.prove(manifest.canary, timeout_s=self._timeout_s, adapter=manifest.name)
                holds = not self._judge.judge(engine.name, manifest, proof, tenant=manifest.tenant).refused
            except OffbeatError:
                holds = False
            if not holds:
                book.shelf.take_out(manifest.name)

    # -- the base model ----------------------------------------------------------------------------------------------------------------

    async def serve_base(self, canary: tuple[int, ...], canary_logprobs: tuple[float, ...]) -> None:
        """Have the engines prove the model without adapters, now and after each healing, so that requests for it are served, too.

        An engine that fails its proof is quarantined.

        Args:
            canary_logprobs: log-probability of each of canary[1:] under the trainers' base model.

        Raises:
            EngineError: too few engines are healthy.
        """
        self._base = (canary, canary_logprobs)

        async def admit(engine: EngineControl) -> None:
            try:
                self._pool.admit(engine.name, await self._prove_base(engine, canary, canary_logprobs))
            except OffbeatError as exc:
                self._pool.quarantine(engine.name, str(exc))

        await gather_all(admit(engine) for engine in (await self._pool.wait_healthy()).values())

    async def _prove_base(self, engine: EngineControl, canary: tuple[int, ...], expected: tuple[float, ...]) -> Version:
        """The version of the base model that an engine serves, which is the trainers'; raises EngineError or DeadlineError."""
        proof = await engine.prove(canary, timeout_s=self._timeout_s)
        if reason := self._judge.objection(expected, proof.canary_logprobs):
            raise ProofError(f"{engine.name} serves another base model: {reason}")
        return proof.version

    # -- healing -----------------------------------------------------------------------------------------------------------------------

    def forget(self, engine: str) -> None:
        """The engine's adapters are gone."""
        shelf = self._books[engine].shelf
        shelf.held.clear()
        shelf.leaving.clear()

    async def refill(self, engine: EngineControl) -> Version | None:
        """Load the newest versions on an engine that is out of service and holds nothing for certain; nothing is missing when this returns.

        An adapter that this engine refuses is left out if no other engine in service holds it either.

        Returns:
            The version of the base model, proven, if that is to be served, too.

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

        version = await self._prove_base(engine, *self._base) if self._base else None
        while missing := self._missing(engine.name, bad):
            await gather_all(load(manifest) for manifest in missing)
        return version

    def _missing(self, engine: str, bad: Collection[str]) -> list[AdapterManifest]:
        shelf = self._books[engine].shelf
        missing = [manifest for manifest in self._catalog.newest() if manifest.name not in shelf.held and manifest.name not in bad
                   and self._num_serving(manifest.name) < self._num_replicas]
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
                                engine, manifest, judge=self._judge, timeout_s=self._timeout_s, patience_s=patience_s,
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
