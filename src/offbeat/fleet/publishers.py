"""Brings versions to the engines, each with proof: whole weights (`WeightsPublisher`) and adapters (`AdapterPublisher`).

An engine that fails or is late, or whose proof is refused, is quarantined with the reason, and heals outside of any publish. The training
loop sees `controller.parts.Publishing`: engines serve whole weights when `publish` returns, and the adapter that a run trains
(`PolicyPublisher`) once `settle` does.

    the fan-out   of the run's adapter consumes what the ranks wrote; produces the version on the engines; waits for each under its own
                  deadline, while the loop and all ranks go on; `settle` waits for it
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from offbeat.aio import deadline
from offbeat.config.weights import WeightsConfig
from offbeat.errors import BusyError, EngineError, OffbeatError, ProofError, PublishError, RefusedError
from offbeat.fleet.adapters import AdapterCache, Installed
from offbeat.fleet.pool import EnginePool
from offbeat.fleet.publication import Action, AdapterPublication, PublishReport, Stage, WeightsPublication
from offbeat.fleet.slots import counted
from offbeat.phase import phase
from offbeat.types import Version
from offbeat.weights.channels import Channel
from offbeat.weights.proof import Judge
from offbeat.weights.protocol import EngineControl, Manifest

OnServed = Callable[[PublishReport], None]
"""Called with the report of a publish as soon as engines serve the version."""

Release = Callable[[PublishReport | None], Awaitable[None]]
"""Lets the ranks that wait for this process go on, and tells them how the publish went; None if it is not over yet."""

_ADAPTER_ROUNDS = 2
"""Attempts at bringing an adapter to engines: if all that were chosen fail, those that have healed meanwhile are tried once more."""


async def release_nobody(_report: PublishReport | None) -> None:
    """Do nothing, because the ranks of a controller do not wait for a publish."""


class WeightsPublisher:
    """Brings whole weights to engines: stage on every engine, switch together, prove, admit. One publish at a time.

    A publish succeeds while `min_engines` of the pool serve, or do once healed: `bring` is how an engine comes back.

    Attributes:
        current: the newest version that was written; what a healed engine has to serve.
    """

    current: Manifest | None = None

    def __init__(
        self, pool: EnginePool, channel: Channel, config: WeightsConfig, *, judge: Judge, release: Release = release_nobody,
    ) -> None:
        """`judge` decides whether an engine's proof is believed; `release` is awaited at the end of each publish."""
        self._pool = pool
        self._channel = channel
        self._config = config
        self._judge = judge
        self._release = release
        self._writing = asyncio.Lock()

    async def publish(self, version: Version, *, on_served: OnServed = lambda _report: None) -> PublishReport:
        """Write the trainer's weights as `version` and bring every healthy engine to it; `on_served` is called before this returns.

        Raises:
            PublishError: too few engines serve the version, and none heals in time; gives each engine's reason.
        """
        start = time.monotonic()
        async with self._writing:
            manifest = await self._channel.write(version)
            self.current = manifest
        engines = self._pool.healthy  # chosen only now: an engine that heals from here on heals to `current`, which is this version
        written = time.monotonic()
        publication, switched = await self._carry_out(manifest, engines)
        end = time.monotonic()
        enough = len(publication.serving) >= self._pool.min_engines
        serving = publication.serving if enough else await self._wait_for_more(publication)
        self._channel.prune()
        report = PublishReport(
            version, total_s=time.monotonic() - start, write_s=written - start, stage_s=switched - written, switch_s=end - switched,
            canary_gap=publication.largest_gap, serving=tuple(serving), quarantined=dict(publication.reasons),
            inconclusive=dict(publication.unsure))
        await self._release(report)
        on_served(report)
        return report

    async def settle(self) -> None:
        """Return at once, because `publish` returns only when engines serve the version; see `Publishing.settle`."""

    async def bring(self, engine: EngineControl) -> Version | None:
        """Bring an engine that is out of service to the current version, and have it prove that; the caller puts it back into service.

        A version that is damaged on disk is written again, as long as the trainer has it.

        Returns:
            The version that is current when this returns; None before the first publish.

        Raises:
            EngineError, DeadlineError: the engine failed; ProofError: it does not sample the current weights.
        """
        config = self._config
        while (manifest := self.current) is not None:
            try:
                await engine.stage(manifest, timeout_s=config.stage_timeout_s)
                await engine.switch(manifest, interrupt=config.interrupt, timeout_s=config.switch_timeout_s)
                proof = await engine.prove(manifest.canary, timeout_s=config.switch_timeout_s)
            except OffbeatError:
                async with self._writing:  # a newer version on its way may have taken this one's place
                    if manifest is self.current:
                        again = await self._channel.rewrite(manifest)
                        if again is None:
                            raise
                        self.current = again
                continue
            if manifest is self.current:
                verdict = self._judge.judge(engine.name, manifest, proof)
                if verdict.refused:
                    raise ProofError(f"{engine.name} failed its proof: {verdict.reason}")
                return manifest.version
        return None

    async def _carry_out(self, manifest: Manifest, engines: Mapping[str, EngineControl]) -> tuple[WeightsPublication, float]:
        """Do what a publication asks for until it is over. Returns it, and the time at which engines began to switch."""
        switched = time.monotonic()
        publication, actions = WeightsPublication.start(manifest, engines, judge=self._judge)
        tasks: set[asyncio.Task[list[Action]]] = set()
        try:
            while actions or tasks:
                if any(action.stage is Stage.SWITCHING for action in actions):
                    switched = time.monotonic()
                # The actions of different engines run at the same time, each under its own deadline.
                tasks |= {asyncio.create_task(self._do(action, engines[action.engine], publication)) for action in actions}
                finished, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                actions = [action for task in finished for action in task.result()]
        finally:
            for task in tasks:
                task.cancel()
        return publication, switched

    async def _do(self, action: Action, engine: EngineControl, publication: WeightsPublication) -> list[Action]:
        manifest, config = publication.manifest, self._config
        try:
            if action.stage is Stage.STAGING:
                await engine.stage(manifest, timeout_s=config.stage_timeout_s)
                return publication.done(engine.name)
            if action.stage is Stage.SWITCHING:
                await engine.switch(manifest, interrupt=config.interrupt, timeout_s=config.switch_timeout_s)
                return publication.done(engine.name)
            proof = await engine.prove(manifest.canary, timeout_s=config.switch_timeout_s)
            actions = publication.proved(engine.name, proof)
        except OffbeatError as exc:
            actions = publication.failed(engine.name, f"{action.stage.value} failed: {exc}")
        if reason := publication.reasons.get(engine.name):
            self._pool.quarantine(engine.name, reason)
        else:
            self._pool.admit(engine.name, manifest.version)
        return actions

    async def _wait_for_more(self, publication: WeightsPublication) -> Collection[str]:
        """Wait until healing has brought enough engines to the version, and return those that serve it."""
        version = publication.manifest.version
        try:
            return await self._pool.wait_healthy(version=version)
        except EngineError as exc:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in publication.reasons.items()) or "no engine is healthy"
            raise PublishError(
                f"version {version} is served by {len(publication.serving)} engines, fewer than the {self._pool.min_engines} needed: "
                f"{reasons}; {exc}") from exc


class AdapterPublisher:
    """Brings versions of adapters to engines: to several at once, each under a deadline of its own. No rank waits for an engine."""

    def __init__(
        self, pool: EnginePool, adapters: AdapterCache, *, on_event: Callable[..., None] = lambda _kind, **_fields: None,
    ) -> None:
        """`on_event` is called with "fanout" (adapter, total_s, num_bytes, and for each engine its seconds, retries and reason to fail)."""
        self._pool = pool
        self._adapters = adapters
        self._on_event = on_event

    async def publish(self, manifest: Manifest, *, pinned: bool = False) -> PublishReport:
        """Bring a version of an adapter to the engines; it is current once the first one serves it.

        Older versions are unloaded when their last requests are done.

        Args:
            pinned: pin the version as `AdapterCache.pin` does; it may then be older than others of its adapter.

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
        self._on_event("fanout", adapter=manifest.name, total_s=round(total_s, 4), num_bytes=manifest.num_bytes, engines=told)
        return publication, PublishReport(
            manifest.version, total_s=total_s, write_s=0.0, stage_s=total_s, switch_s=0.0,
            canary_gap=max((one.canary_gap for one in installed.values()), default=0.0), serving=tuple(publication.serving),
            quarantined=dict(publication.reasons),
            inconclusive={engine: one.inconclusive for engine, one in installed.items() if one.inconclusive})

    async def _deliver(
        self, engine: EngineControl, manifest: Manifest, publication: AdapterPublication,
    ) -> tuple[dict[str, str], Installed]:
        """Have one engine load and prove an adapter. Returns the engines to blame, with reasons, and how the adapter came to the engine."""
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


class PolicyPublisher:
    """Publishes the adapter that a run trains: the ranks go on as soon as it is written, while engines load it.

    Use as `async with`; leaving gives up a version that is on its way.
    """

    def __init__(self, publisher: AdapterPublisher, channel: Channel, *, adapter: str, release: Release = release_nobody) -> None:
        """`adapter` is the name of the run's adapter; see `weights.adapters.policy_adapter`."""
        self._publisher = publisher
        self._channel = channel
        self._adapter = adapter
        self._release = release
        self._fanout: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._fanout is not None:
            self._fanout.cancel()
            await asyncio.gather(self._fanout, return_exceptions=True)

    async def publish(self, version: Version, *, on_served: OnServed) -> None:
        """See `Publishing.publish`; engines load the version after this returns.

        Raises:
            PublishError: no engine serves the version before; gives each engine's reason.
        """
        await self.settle()
        start = time.monotonic()
        written = await self._channel.write(version)
        num_bytes = sum(file.stat().st_size for file in Path(written.folder).glob("*.safetensors"))
        write_s = time.monotonic() - start
        await self._release(None)

        async def fan_out() -> None:
            report = await self._publisher.publish(replace(written, adapter=self._adapter, num_bytes=num_bytes))
            on_served(replace(report, total_s=time.monotonic() - start, write_s=write_s))

        self._fanout = asyncio.create_task(fan_out(), name=f"fan-out of version {version}")

    async def settle(self) -> None:
        """See `Publishing.settle`.

        Raises:
            PublishError: no engine serves the version published last; gives each engine's reason.
        """
        if self._fanout is not None:
            with phase("waiting for engines to load the adapter"):
                await self._fanout
