"""The engines as a cache of adapters: the adapters on each engine, and the ones to unload for others.

Requests (`dispatch`) and publishes (`publishers`) have adapters loaded here; the catalog knows which versions there are. An adapter that a
request wants and no engine in service holds is loaded and proven first. All of this state belongs to the event loop: reads and changes
without an `await` in between are atomic.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from offbeat.aio import deadline, gather_all
from offbeat.disk import discard
from offbeat.errors import BusyError, DeadlineError, EngineError, OffbeatError, ProofError, PublishError, RefusedError
from offbeat.fleet.catalog import Catalog, adapter_of
from offbeat.fleet.pool import EnginePool
from offbeat.fleet.slots import AdapterSlots, counted
from offbeat.types import Version
from offbeat.weights.proof import ProofJudge, Verdict
from offbeat.weights.protocol import EngineControl, Manifest

_BUSY_RETRY_S = 0.1
_UNLOAD_TIMEOUT_S = 30.0
_DISCARD_TIMEOUT_S = 5.0
"""Deadline for unloading an adapter that was not proven: no request goes there, so it only takes room."""


@dataclass(frozen=True)
class Installed:
    """Result of bringing an adapter to an engine that serves it.

    Attributes:
        num_retries: number of times that the engine was busy.
        canary_gap: difference of the canary's mean log-probability between the trainer and the engine, in nats; 0 if it was there already.
        inconclusive: why its proof is inconclusive; empty if it is conclusive.
        means: what it is proven by, one of `weights.proof.MEANS`; empty if it was there already.
    """

    num_retries: int = 0
    canary_gap: float = 0.0
    inconclusive: str = ""
    means: str = ""


class AdapterCache:
    """The adapters on the engines of a pool. Use as `async with`; leaving cancels unloading that is under way.

    Requests are over then, so folders go that they alone have kept.

    Attributes:
        slots: the adapters of each engine, by the engine's name.
        timeout_s: time for one engine to load and prove one adapter.
    """

    def __init__(self, pool: EnginePool, *, capacity: int, judge: ProofJudge, timeout_s: float, keep: int = 2) -> None:
        """Begin with engines that hold no adapters.

        Args:
            capacity: number of adapters that an engine holds at once.
            keep: number of each adapter's newest versions whose folders stay, besides versions in use.

        The pool's listener hears of "adapter_loaded" (engine, adapter, seconds) or "load_failed" (engine, adapter, reason) for each load
        outside of publishes.
        """
        self.catalog = Catalog(keep=keep)
        self.slots = {name: AdapterSlots(capacity) for name in pool.states}
        self.timeout_s = timeout_s
        self._pool = pool
        self._capacity = capacity
        self._judge = judge
        self._base: tuple[tuple[int, ...], tuple[float, ...]] | None = None
        self._requests: Counter[str] = Counter()
        self._chores: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        self._remove_all_but(())

    # -- versions ----------------------------------------------------------------------------------------------------------------------

    def add(self, manifest: Manifest, *, pinned: bool = False) -> None:
        """Add a version that is about to be published; see `Catalog.add`.

        Raises:
            PublishError: the name stands for another version, or did and is still in use; or the adapter has one at least as new.
        """
        self._check_unused(manifest.name)
        self.catalog.add(manifest, pinned=pinned)

    def pin(self, manifest: Manifest) -> None:
        """Keep a version and its folder until it is unpinned, regardless of other versions of its adapter.

        No engine loads it now. One loads and proves it before its first request there, and again if it has made room for others since.

        Raises:
            PublishError: the name stands for another version, or did and is still in use.
        """
        self._check_unused(manifest.name)
        self.catalog.pin(manifest)

    def unpin(self, name: str) -> None:
        """Stop serving a version, even if it is its adapter's current one. Requests in flight finish, and its folder stays."""
        self.catalog.unpin(name)
        self._judge.forget_adapter(adapter_of(name))
        self.retire(adapter_of(name))

    def remove(self, adapter: str) -> None:
        """Stop serving the published versions of an adapter. Requests in flight finish; its folders and its pinned versions stay."""
        self.catalog.remove(adapter)
        self._judge.forget_adapter(adapter)
        self.retire(adapter)

    def retire(self, adapter: str) -> None:
        """Unload every version of the adapter that is neither current nor pinned, each as soon as no request uses it."""
        for engine, slots in self.slots.items():
            slots.leaving |= {name for name in slots.held if adapter_of(name) == adapter and self.catalog.may_go(name)}
            self._unload_drained(engine)

    def prune(self) -> None:
        """Remove the folders of versions that are neither among an adapter's newest nor pinned, and that no engine or request may read."""
        self._remove_all_but({*self._requests}.union(*(slots.names for slots in self.slots.values())))

    def _remove_all_but(self, in_use: Collection[str]) -> None:
        for folder in self.catalog.prune(in_use):
            discard(Path(folder))  # does nothing if the folder is gone already

    def _check_unused(self, name: str) -> None:
        """Raise PublishError if engines still hold something else under this name."""
        if self.catalog.get(name) is None and any(name in slots.names for slots in self.slots.values()):
            raise PublishError(f"requests still use {name} of a removed adapter {adapter_of(name)}; publish another version, or later")

    # -- where adapters are ------------------------------------------------------------------------------------------------------------

    @property
    def held(self) -> Mapping[str, list[str]]:
        """Names of the adapters that each engine holds, the least recently used first."""
        return {engine: list(slots.held) for engine, slots in self.slots.items()}

    def holders(self, name: str) -> list[str]:
        """Return the engines in service that hold an adapter; if there is none, the engines that are loading it."""
        slots = {engine: self.slots[engine] for engine in self._pool.healthy}
        return [e for e, its in slots.items() if name in its.held] or [e for e, its in slots.items() if name in its.coming]

    def targets(self, adapter: str, engines: Collection[str]) -> list[str]:
        """Choose engines for a new version: first holders of another version of the adapter, then engines with the fewest adapters."""
        adapters = {engine: {adapter_of(name) for name in self.slots[engine].names} for engine in engines}
        ranked = sorted(engines, key=lambda engine: (adapter not in adapters[engine], len(adapters[engine])))
        return ranked[: self._num_replicas]

    @property
    def _num_replicas(self) -> int:
        """Number of engines for each adapter: E * C / (2 A), so that an old and a new version of all A adapters fit into E engines of C.

        For example, 4 engines of 8 adapters with 5 adapters give 4 * 8 // 10 = 3.
        """
        return max(len(self.slots) * self._capacity // (2 * max(self.catalog.num_adapters, 1)), 1)

    # -- requests ----------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def wanted(self, adapter: str) -> Iterator[Manifest]:
        """Yield an adapter's current version, or the one of "coder@7"; its folder stays meanwhile. Raises RefusedError if there is none."""
        manifest = self.catalog.find(adapter)
        with counted(self._requests, manifest.name):
            yield manifest

    @asynccontextmanager
    async def holding(self, engine: EngineControl, manifest: Manifest) -> AsyncIterator[None]:
        """Hold an adapter on an engine during the body, loading and proving it if needed; raises EngineError if that takes too long."""
        slots, name, start = self.slots[engine.name], manifest.name, time.monotonic()
        if name not in slots.held:
            try:
                await self.install(engine, manifest)
            except OffbeatError as exc:
                self._pool.listener.event("load_failed", engine=engine.name, adapter=name, reason=str(exc))
                if isinstance(exc, DeadlineError):
                    raise EngineError(str(exc)) from exc
                raise
            self._pool.listener.event("adapter_loaded", engine=engine.name, adapter=name, seconds=round(time.monotonic() - start, 3))
        slots.put(name)
        try:
            with counted(slots.in_use, name):
                yield
        finally:
            if self.catalog.get(name) is None and name in slots.held:  # forgotten while it was loaded
                slots.leaving.add(name)
            self._unload_drained(engine.name)

    async def verify(self, engine: EngineControl, manifest: Manifest) -> None:
        """Have an engine prove an adapter that it should hold. If it cannot, the adapter counts as not held and is loaded again."""
        slots = self.slots[engine.name]
        async with slots.lock(manifest.name):
            try:
                proof = await engine.prove(manifest.canary, timeout_s=self.timeout_s, adapter=manifest.name)
                holds = not self._judge.judge(engine.name, manifest, proof).refused
            except OffbeatError:
                holds = False
            if not holds:
                slots.take_out(manifest.name)

    # -- the base model ----------------------------------------------------------------------------------------------------------------

    async def serve_base(self, canary: tuple[int, ...], canary_logprobs: tuple[float, ...]) -> None:
        """Have the engines prove the model without adapters, now and after each healing, so that requests for it are served, too.

        An engine that fails its proof is quarantined.

        Args:
            canary: [C] token IDs.
            canary_logprobs: [C - 1] log-probabilities of canary[1:] under the trainers' base model.

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
        """Return the version of the base model that an engine serves, once proven; raises EngineError or DeadlineError."""
        proof = await engine.prove(canary, timeout_s=self.timeout_s)
        if reason := self._judge.objection(expected, proof.canary_logprobs):
            raise ProofError(f"{engine.name} serves another base model: {reason}")
        return proof.version

    # -- healing -----------------------------------------------------------------------------------------------------------------------

    async def refill(self, engine: EngineControl) -> Version | None:
        """Load the newest versions on an engine that is out of service, as if it held none; none is missing when this returns.

        An adapter that this engine refuses is left out if no other engine in service holds it either.

        Returns:
            The proven version of the base model, if the base model is served, too; otherwise None.

        Raises:
            EngineError, DeadlineError: the engine failed, or it refuses an adapter that another one serves.
        """
        self.slots[engine.name].clear()
        bad: set[str] = set()

        async def load(manifest: Manifest) -> None:
            try:
                await self.install(engine, manifest, patience_s=self.timeout_s / 2)
            except (RefusedError, ProofError):
                if self._num_serving(manifest.name):
                    raise
                bad.add(manifest.name)

        version = await self._prove_base(engine, *self._base) if self._base else None
        while missing := self._missing(engine.name, bad):
            await gather_all(load(manifest) for manifest in missing)
        return version

    def _missing(self, engine: str, bad: Collection[str]) -> list[Manifest]:
        held = self.slots[engine].held
        missing = [manifest for manifest in self.catalog.newest() if manifest.name not in held and manifest.name not in bad
                   and self._num_serving(manifest.name) < self._num_replicas]
        return missing[: max(self._capacity - len(held), 0)]

    def _num_serving(self, name: str) -> int:
        return sum(name in self.slots[engine].held for engine in self._pool.healthy)

    # -- loading and unloading ---------------------------------------------------------------------------------------------------------

    async def install(self, engine: EngineControl, manifest: Manifest, *, patience_s: float = 0.0) -> Installed:
        """Load an adapter on an engine and prove it, unless the engine holds it already.

        `patience_s` is the time for which a full engine is asked again.

        Raises:
            BusyError: its adapters stayed in use; RefusedError: it takes no such adapter; ProofError: it samples from other weights.
            EngineError, DeadlineError: it failed.
        """
        slots, name = self.slots[engine.name], manifest.name
        async with deadline(f"loading {name} on {engine.name}", self.timeout_s):
            with counted(slots.coming, name):
                async with slots.lock(name):
                    if name in slots.held:
                        return Installed()
                    async with slots.turns:
                        with slots.loading():
                            num_retries = await self._load(engine, manifest, patience_s=patience_s)
                            verdict = await self._prove(engine, manifest)
                        slots.put(name)
                        return Installed(num_retries, verdict.gap, verdict.reason, verdict.means)

    async def _load(self, engine: EngineControl, manifest: Manifest, *, patience_s: float) -> int:
        """Make room on an engine and load an adapter. Returns the number of times that the engine was busy."""
        give_up_s = time.monotonic() + patience_s
        for num_retries in itertools.count():
            try:
                for victim in self.slots[engine.name].make_room():
                    await self._unload(engine, victim)
                try:
                    await engine.load_adapter(manifest.name, manifest.folder, timeout_s=self.timeout_s)
                except RefusedError:  # perhaps because an earlier run has left an adapter of this name there
                    await engine.unload_adapter(manifest.name, timeout_s=self.timeout_s)
                    await engine.load_adapter(manifest.name, manifest.folder, timeout_s=self.timeout_s)
                return num_retries
            except BusyError:
                if time.monotonic() >= give_up_s:
                    raise
                await asyncio.sleep(_BUSY_RETRY_S)
        raise AssertionError("a count has no end")

    async def _prove(self, engine: EngineControl, manifest: Manifest) -> Verdict:
        """Have an engine prove an adapter that it has loaded, and unload it again if the proof fails."""
        try:
            proof = await engine.prove(manifest.canary, adapter=manifest.name, timeout_s=self.timeout_s)
            verdict = self._judge.judge(engine.name, manifest, proof)
            if not verdict.refused:
                return verdict
            reason = verdict.reason
        except RefusedError as exc:  # although it says that it has loaded it
            reason = str(exc)
        with suppress(OffbeatError):
            await engine.unload_adapter(manifest.name, timeout_s=_DISCARD_TIMEOUT_S)
        raise ProofError(f"{engine.name} failed its proof of {manifest.name}: {reason}")

    def _unload_drained(self, engine: str) -> None:
        control = self._pool.healthy.get(engine)
        if control is None:  # it is forgotten before it returns
            return
        for name in self.slots[engine].drained():
            chore = asyncio.create_task(self._unload_beside(control, name), name=f"unload {name} on {engine}")
            self._chores.add(chore)
            chore.add_done_callback(self._chores.discard)

    async def _unload_beside(self, engine: EngineControl, name: str) -> None:
        with suppress(OffbeatError):  # nobody is sent there; an engine that fails this fails its probe, too
            await self._unload(engine, name)

    async def _unload(self, engine: EngineControl, name: str) -> None:
        slots = self.slots[engine.name]
        async with slots.lock(name):
            if name not in slots.held:  # it may have been wanted again
                await engine.unload_adapter(name, timeout_s=_UNLOAD_TIMEOUT_S)
