"""Brings versions to the engines, each with proof: whole weights (`WeightsPublisher`) and adapters (`AdapterPublisher`).

An engine that fails or is late, or whose proof is refused, is quarantined with the reason, and heals outside of any publish. The training
loop sees `controller.parts.Publishing`: its whole weights or its adapter (`PolicyPublisher`) are written when `publish` returns, and
engines serve them once `settle` does.

    a fan-out   consumes a version written by the ranks; produces it on the engines; waits for each under its own deadline, while the loop
                and all ranks go on; `settle` waits for it
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from offbeat.aio import deadline, gather_all
from offbeat.config.weights import WeightsConfig
from offbeat.errors import BusyError, DeadlineError, EngineError, OffbeatError, ProofError, PublishError, RefusedError
from offbeat.fleet.adapters import AdapterCache, Installed
from offbeat.fleet.pool import EnginePool
from offbeat.fleet.publication import AdapterPublication, PublishReport, Taken, WeightsPublication
from offbeat.fleet.slots import counted
from offbeat.phase import phase
from offbeat.types import Version
from offbeat.weights.channels import Channel
from offbeat.weights.proof import ProofJudge
from offbeat.weights.protocol import EngineControl, Manifest

OnServed = Callable[[PublishReport], None]
"""Called with the report of a publish as soon as engines serve the version."""

Release = Callable[[PublishReport | None], Awaitable[None]]
"""Lets the ranks that wait for this process go on, with the report of the publish; None if it is not over yet."""

OnWritten = Callable[[], Awaitable[None]]
"""Called when the ranks have written a version, before engines take it."""

_ADAPTER_ROUNDS = 2
"""Attempts at bringing an adapter to engines: if all chosen engines fail, the ones that have healed meanwhile are tried once more."""


async def release_nobody(_report: PublishReport | None) -> None:
    """Do nothing, because the ranks of a controller do not wait for a publish."""


async def wake_nobody() -> None:
    """Do nothing, because engines do not sleep."""


@dataclass(frozen=True)
class WrittenVersion:
    """A version that the ranks have written, between two times of `time.monotonic`."""

    manifest: Manifest
    start_s: float
    end_s: float


class Fanouts(ABC):
    """Versions on their way to the engines while the loop goes on, in the order in which they were written.

    Use as `async with`; leaving cancels the ones that are still on their way.
    """

    def __init__(self) -> None:
        self._tasks: deque[asyncio.Task[None]] = deque()
        self._failed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @abstractmethod
    async def _fan_out(self, written: WrittenVersion) -> PublishReport:
        """Bring a version to the engines."""

    def fan_out(self, written: WrittenVersion, on_served: OnServed) -> None:
        """Begin to bring a version to the engines; `on_served` is called in the order of versions."""
        before = self._tasks[-1] if self._tasks else None
        task = asyncio.create_task(self._arrive(written, before, on_served), name=f"fan-out of version {written.manifest.version}")
        task.add_done_callback(self._note_failure)
        self._tasks.append(task)

    async def watch(self) -> None:
        """Wait until a version cannot be brought to the engines, and raise its error; see `settle`."""
        await self._failed.wait()
        for task in self._tasks:
            if task.done():
                task.result()
        raise AssertionError("a publish has failed, and its error is gone")

    async def settle(self, *, behind: int = 0) -> None:
        """See `Publishing.settle`. Raises PublishError, with each engine's reason, if no engine, or too few, serve a version."""
        while self._tasks and (len(self._tasks) > behind or self._tasks[0].done()):
            task = self._tasks[0]
            with phase("waiting for engines to load the weights"):
                await asyncio.wait([task])
            task.result()
            if self._tasks and self._tasks[0] is task:  # unless somebody else has waited for it, too
                self._tasks.popleft()

    async def _arrive(self, written: WrittenVersion, before: asyncio.Task[None] | None, on_served: OnServed) -> None:
        report = await self._fan_out(written)
        if before is not None:
            await asyncio.wait([before])
            before.result()
        on_served(report)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failed.set()


class WeightsPublisher(Fanouts):
    """Brings whole weights to engines, each at its own pace: it stages them, switches, proves them, and serves them from then on.

    An engine that is still at work on a version when newer ones are there goes on with the newest. A publish succeeds while `min_engines`
    of the pool serve, or do once healed by `bring` to `current`, the newest version that was written.
    """

    current: Manifest | None = None

    def __init__(
        self, pool: EnginePool, channel: Channel, config: WeightsConfig, *, judge: ProofJudge, release: Release = release_nobody,
        waits: bool = False, on_written: OnWritten = wake_nobody,
    ) -> None:
        """Publish to the engines of a pool. If it `waits`, `publish` returns only when engines serve the version, and `release` passes on
        the report, for ranks that roll out, too.
        """
        super().__init__()
        self._pool = pool
        self._channel = channel
        self._config = config
        self._judge = judge
        self._release = release
        self._waits = waits
        self._on_written = on_written
        self._writing = asyncio.Lock()
        self._turns: dict[str, asyncio.Lock] = {name: asyncio.Lock() for name in pool.members}

    async def publish(self, version: Version, *, on_served: OnServed = lambda _report: None) -> None:
        """Write the trainer's weights as `version`; every healthy engine takes it, and `on_served` is called when all of them have.

        Raises:
            PublishError: it `waits`, and too few engines serve the version; gives each engine's reason. Otherwise `settle` raises it.
        """
        start = time.monotonic()
        async with self._writing:
            manifest = await self._channel.write(version, num_receivers=len(self._pool.healthy))
            self.current = manifest
        written = WrittenVersion(manifest, start, time.monotonic())
        await self._on_written()
        if not self._waits:
            await self._release(None)
            self.fan_out(written, on_served)
            return
        report = await self._fan_out(written)
        await self._release(report)
        on_served(report)

    async def bring(self, engine: EngineControl) -> Version | None:
        """Bring an engine that is out of service to the current version, with proof; the caller puts it back into service.

        A version that is damaged on disk is written again, as long as the trainer has it.

        Returns:
            The version that is current when this returns; None before the first publish.

        Raises:
            EngineError, DeadlineError: the engine failed; ProofError: it does not sample the current weights.
        """
        while (manifest := self.current) is not None:
            try:
                taken = await self._take(engine, manifest)
            except _TakingError as failed:
                async with self._writing:  # a newer version on its way may have taken this one's place
                    if manifest is self.current:
                        again = await self._channel.rewrite(manifest)
                        if again is None:
                            raise failed.cause from failed
                        self.current = again
                continue
            if manifest is self.current:
                if taken.verdict.refused:
                    raise ProofError(f"{engine.name} failed its proof: {taken.verdict.reason}")
                return manifest.version
        return None

    async def _fan_out(self, written: WrittenVersion) -> PublishReport:
        """Have every engine in service come to a version, each at its own pace, and wait until enough of them serve it."""
        # Engines that heal from here on heal to `current`, which is this version or a newer one.
        manifest = written.manifest
        publication, engines = WeightsPublication(manifest.version), self._pool.healthy
        await gather_all(self._carry(engine, publication) for engine in engines.values())
        serving: Collection[str] = publication.serving
        if len(serving) < self._pool.min_engines:
            serving = await self._wait_for_more(publication)
        self._channel.prune(manifest.version)
        return PublishReport(
            manifest.version, total_s=time.monotonic() - written.start_s, write_s=written.end_s - written.start_s,
            stage_s=publication.stage_s, switch_s=publication.switch_s, canary_gap=publication.largest_gap, serving=tuple(serving),
            quarantined=dict(publication.reasons), inconclusive=dict(publication.unsure), num_bytes=manifest.num_bytes,
            proofs=dict(publication.proofs))

    async def _carry(self, engine: EngineControl, publication: WeightsPublication) -> None:
        """Bring an engine in service to the current version until it serves the publication's or a newer one; quarantine it if it fails.

        It takes one version after the other, so that a slow engine may leave some out.
        """
        name, member, taken = engine.name, self._pool.members[engine.name], None
        async with self._turns[name]:
            while not member.serves(publication.version):
                manifest = self.current
                assert manifest is not None, "what is published was written before"
                try:
                    taken = await self._take(engine, manifest)
                except _TakingError as failed:
                    if failed.may_be_gone and manifest is not self.current and member.healthy:
                        continue  # the newer version has taken its place while the engine read it
                    reason = str(failed)
                else:
                    reason = taken.verdict.reason if taken.verdict.refused else ""
                if reason:
                    publication.failed(name, reason)
                    self._pool.quarantine(name, reason)
                    return
                self._pool.admit(name, manifest.version)
        publication.served(name, taken)

    async def _take(self, engine: EngineControl, manifest: Manifest) -> Taken:
        """Have an engine stage a version, switch to it and prove it. Raises _TakingError if it fails, but not if its proof is refused."""
        config, times, doing = self._config, [time.monotonic()], "staging"
        try:
            await engine.stage(manifest, timeout_s=config.stage_timeout_s)
            times, doing = [*times, time.monotonic()], "switching"
            await engine.switch(manifest, interrupt=config.interrupt, timeout_s=config.switch_timeout_s)
            doing = "proving"
            proof = await engine.prove(manifest.canary, timeout_s=config.switch_timeout_s)
        except OffbeatError as exc:
            raise _TakingError(doing, exc) from exc
        began, staged = times
        return Taken(staged - began, time.monotonic() - staged, self._judge.judge(engine.name, manifest, proof))

    async def _wait_for_more(self, publication: WeightsPublication) -> Collection[str]:
        """Wait until healing has brought enough engines to the version, and return the ones that serve it."""
        version = publication.version
        try:
            return await self._pool.wait_healthy(version=version)
        except EngineError as exc:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in publication.reasons.items()) or "no engine is healthy"
            raise PublishError(
                f"version {version} is served by {len(publication.serving)} engines, fewer than the {self._pool.min_engines} needed: "
                f"{reasons}; {exc}") from exc


class _TakingError(Exception):
    """An engine failed to take a version; `may_be_gone` says whether that may be because the version is not there any more."""

    def __init__(self, doing: str, cause: OffbeatError) -> None:
        super().__init__(f"{doing} failed: {cause}")
        self.cause = cause
        self.may_be_gone = doing == "staging" and not isinstance(cause, DeadlineError)


class AdapterPublisher:
    """Brings versions of adapters to engines: to several at once, each under a deadline of its own. No rank waits for an engine."""

    def __init__(self, pool: EnginePool, adapters: AdapterCache) -> None:
        """Publish to the engines of `pool`, which hold these adapters.

        The pool's listener hears of "fanout" (adapter, total_s, num_bytes, and for each engine its seconds, retries and reason to fail).
        """
        self._pool = pool
        self._adapters = adapters

    async def publish(self, manifest: Manifest, *, pinned: bool = False) -> PublishReport:
        """Bring a version of an adapter to the engines; it is current once the first one serves it.

        Older versions are unloaded when their last requests are done.

        A `pinned` version is pinned as `AdapterCache.pin` does; it may then be older than others of its adapter.

        Raises:
            PublishError: no engine serves it, and none heals in time; gives each engine's reason. The adapter's older versions, and all
                other adapters, go on as before.
        """
        cache, name = self._adapters, manifest.name
        was_known = cache.catalog.get(name) is not None
        cache.add(manifest, pinned=pinned)
        try:
            for _ in range(_ADAPTER_ROUNDS):
                publication, report = await self._fan_out(manifest)
                if publication.serving or publication.adapter_is_bad:
                    break
            if publication.serving:
                return report
            reasons = "; ".join(f"{engine}: {reason}" for engine, reason in publication.reasons.items())
            verdict = "is bad: no engine takes it" if publication.adapter_is_bad else "is served by no engine: none is left"
            raise PublishError(f"the adapter {name} {verdict}; {reasons}")
        except BaseException as exc:
            if not was_known:
                cache.catalog.withdraw(name)
            if isinstance(exc, EngineError):
                raise PublishError(f"{name} could not be published: {exc}") from exc
            raise
        finally:
            cache.retire(manifest.adapter)
            cache.prune()

    async def _fan_out(self, manifest: Manifest) -> tuple[AdapterPublication, PublishReport]:
        """Bring an adapter to engines once. Raises EngineError if too few are healthy; the failure of a single engine is in the report."""
        engines = await self._pool.wait_healthy()
        targets = self._adapters.targets(manifest.adapter, engines)
        publication, installed, start = AdapterPublication(), dict[str, Installed](), time.monotonic()
        told: dict[str, dict[str, Any]] = {}

        async def deliver(engine: str) -> None:
            blamed, one = await self._deliver(engines[engine], manifest, publication)
            installed[engine] = one
            told[engine] = {
                "seconds": round(time.monotonic() - start, 4), "retries": one.num_retries, "reason": publication.reasons.get(engine, "")}
            for lost, why in blamed.items():
                self._pool.quarantine(lost, why)

        with ExitStack() as stack:
            for target in targets:  # before any load begins, so that publishes that choose engines meanwhile count them
                stack.enter_context(counted(self._adapters.slots[target].coming, manifest.name))
            async with asyncio.TaskGroup() as tasks:
                for target in targets:
                    tasks.create_task(deliver(target), name=f"{manifest.name} to {target}")
        total_s = time.monotonic() - start
        self._pool.listener.event("fanout", adapter=manifest.name, total_s=round(total_s, 4), num_bytes=manifest.num_bytes, engines=told)
        return publication, PublishReport(
            manifest.version, total_s=total_s, write_s=0.0, stage_s=total_s, switch_s=0.0,
            canary_gap=max((one.canary_gap for one in installed.values()), default=0.0), serving=tuple(publication.serving),
            quarantined=dict(publication.reasons),
            inconclusive={engine: one.inconclusive for engine, one in installed.items() if one.inconclusive},
            proofs=dict(Counter(one.means for one in installed.values() if one.means)))

    async def _deliver(
        self, engine: EngineControl, manifest: Manifest, publication: AdapterPublication,
    ) -> tuple[dict[str, str], Installed]:
        """Have one engine load and prove an adapter. Returns the engines to blame, with reasons, and the result of the installation."""
        timeout_s = self._adapters.timeout_s
        try:
            async with deadline(f"{manifest.name} on {engine.name}", timeout_s):
                installed = await self._adapters.install(engine, manifest, patience_s=timeout_s / 2)
        except BusyError as exc:
            return publication.full(engine.name, str(exc)), Installed()
        except (RefusedError, ProofError) as exc:
            return publication.doubted(engine.name, str(exc)), Installed()
        except OffbeatError as exc:
            return publication.failed(engine.name, str(exc)), Installed()
        self._adapters.catalog.serves(manifest.name)
        return publication.served(engine.name), installed


class PolicyPublisher(Fanouts):
    """Publishes the adapter that a run trains: the ranks go on as soon as it is written, while engines load it."""

    def __init__(
        self, publisher: AdapterPublisher, channel: Channel, *, adapter: str, release: Release = release_nobody,
        on_written: OnWritten = wake_nobody,
    ) -> None:
        """`adapter` is the name of the run's adapter, see `weights.adapters.policy_adapter`; the rest is as for `WeightsPublisher`."""
        super().__init__()
        self._publisher = publisher
        self._channel = channel
        self._adapter = adapter
        self._release = release
        self._on_written = on_written

    async def publish(self, version: Version, *, on_served: OnServed) -> None:
        """See `Publishing.publish`; engines load the version after this returns, and have loaded the one before by then.

        Raises:
            PublishError: no engine serves the version before; gives each engine's reason.
        """
        await self.settle()
        start = time.monotonic()
        manifest = await self._channel.write(version)
        num_bytes = sum(file.stat().st_size for file in Path(manifest.folder).glob("*.safetensors"))
        written = WrittenVersion(replace(manifest, adapter=self._adapter, num_bytes=num_bytes), start, time.monotonic())
        await self._on_written()
        await self._release(None)
        self.fan_out(written, on_served)

    async def _fan_out(self, written: WrittenVersion) -> PublishReport:
        report = await self._publisher.publish(written.manifest)
        return replace(
            report, total_s=time.monotonic() - written.start_s, write_s=written.end_s - written.start_s,
            num_bytes=written.manifest.num_bytes)
