"""LoRA fan-out: one adapter to many engines at once. Each loads and proves it at its own pace, under a deadline of its own.

`Fanout` decides whose fault a failure is (events in, engines to blame out, no I/O); `fan_out` does. Called by `offbeat.fleet.adapters`
after the ranks that wrote the adapter have passed their barrier: no rank waits for an engine, and no engine for another.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from offbeat.aio import deadline
from offbeat.errors import BusyError, OffbeatError, ProofError, PublishError, RefusedError
from offbeat.weights.adapters import AdapterManifest
from offbeat.weights.proof import Judge
from offbeat.weights.protocol import EngineControl

_BUSY_RETRY_S = 0.1
_UNLOAD_TIMEOUT_S = 5.0


@dataclass
class Fanout:
    """Whose fault it is when engines do not take an adapter.

    An engine that dies or is late is to blame at once; one that is full is not. One that refuses the adapter, or proves something else, is
    in doubt: it is to blame as soon as another engine serves the adapter. If none ever does, the adapter is bad, and no engine that judged
    it is to blame.
    """

    serving: list[str] = field(default_factory=list)
    doubts: dict[str, str] = field(default_factory=dict)

    def served(self, engine: str) -> dict[str, str]:
        """The engine has loaded the adapter and proven it. Gives the engines that are to blame from now, with reasons."""
        self.serving.append(engine)
        return self._settle()

    def failed(self, engine: str, reason: str) -> dict[str, str]:
        """The engine died, failed or was late."""
        return {engine: reason}

    def doubted(self, engine: str, reason: str) -> dict[str, str]:
        """The engine refused the adapter, or its proof is wrong."""
        self.doubts[engine] = reason
        return self._settle()

    def _settle(self) -> dict[str, str]:
        if not self.serving:
            return {}
        blamed, self.doubts = self.doubts, {}
        return blamed


@dataclass(frozen=True)
class Installed:
    """How an adapter came to an engine that serves it.

    Attributes:
        num_retries: times that the engine was busy.
        canary_gap: difference of the canary's mean log-probability between the trainer and the engine; 0 if it was there already.
        inconclusive: why its proof shows nothing, where it does not.
    """

    num_retries: int = 0
    canary_gap: float = 0.0
    inconclusive: str = ""


@dataclass(frozen=True)
class Delivery:
    """How one engine took an adapter.

    Attributes:
        seconds: until it served or failed.
        reason: why it failed; empty if it serves.
        num_retries, canary_gap, inconclusive: see `Installed`; 0 or empty if it failed.
        num_bytes: of the adapter; 0 if it failed.
    """

    seconds: float
    reason: str = ""
    num_retries: int = 0
    canary_gap: float = 0.0
    num_bytes: int = 0
    inconclusive: str = ""


@dataclass(frozen=True)
class FanoutReport:
    """How all engines took an adapter.

    Attributes:
        total_s: until the last engine served or failed.
        deliveries: by engine.
        adapter_is_bad: no engine serves it, and at least one judged it rather than failing.
    """

    name: str
    total_s: float
    deliveries: Mapping[str, Delivery]
    adapter_is_bad: bool

    @property
    def serving(self) -> list[str]:
        return [engine for engine, delivery in self.deliveries.items() if not delivery.reason]

    @property
    def canary_gap(self) -> float:
        """The largest of the engines that serve it."""
        return max((delivery.canary_gap for delivery in self.deliveries.values()), default=0.0)

    @property
    def inconclusive(self) -> dict[str, str]:
        """Engines that serve it although their proof shows nothing, and why it does not."""
        return {engine: delivery.inconclusive for engine, delivery in self.deliveries.items() if delivery.inconclusive}

    def check(self) -> Self:
        """Itself, if an engine serves the adapter.

        Raises:
            PublishError: none does; each engine's reason.
        """
        if self.serving:
            return self
        reasons = "; ".join(f"{engine}: {delivery.reason}" for engine, delivery in self.deliveries.items()) or "no engine is healthy"
        verdict = "is bad: no engine takes it" if self.adapter_is_bad else "is served by no engine: none is left"
        raise PublishError(f"the adapter {self.name} {verdict}; {reasons}")


async def _do_nothing() -> None:
    """There is room."""


Install = Callable[[EngineControl], Awaitable[Installed]]
"""Loads and proves an adapter on an engine. Raises EngineError or DeadlineError."""


async def fan_out(
    name: str,
    engines: Iterable[EngineControl],
    install: Install,
    *,
    timeout_s: float,
    num_bytes: int = 0,
    on_serving: Callable[[str, str], None] = lambda _engine, _name: None,
    on_failed: Callable[[str, str], None] = lambda _engine, _reason: None,
) -> FanoutReport:
    """Bring an adapter to all engines at once. Never raises because of an engine: see `FanoutReport.check`.

    Args:
        timeout_s: deadline of each engine.
        on_serving: hears (engine, adapter) of each engine at once.
        on_failed: hears (engine, reason) of each engine that is to blame, as soon as that is known.
    """
    fanout, deliveries, start = Fanout(), dict[str, Delivery](), time.monotonic()

    async def deliver(engine: EngineControl) -> None:
        installed, reason = Installed(), ""
        try:
            async with deadline(f"{name} on {engine.name}", timeout_s):
                installed = await install(engine)
        except BusyError as exc:
            reason, blamed = str(exc), {}
        except (RefusedError, ProofError) as exc:
            reason = str(exc)
            blamed = fanout.doubted(engine.name, reason)
        except OffbeatError as exc:
            reason = str(exc)
            blamed = fanout.failed(engine.name, reason)
        else:
            on_serving(engine.name, name)
            blamed = fanout.served(engine.name)
        deliveries[engine.name] = Delivery(
            time.monotonic() - start, reason, installed.num_retries, installed.canary_gap, 0 if reason else num_bytes,
            installed.inconclusive)
        for lost, why in blamed.items():
            on_failed(lost, why)

    async with asyncio.TaskGroup() as tasks:
        for engine in engines:
            tasks.create_task(deliver(engine), name=f"{name} to {engine.name}")
    return FanoutReport(name, time.monotonic() - start, deliveries, adapter_is_bad=bool(fanout.doubts))


async def _load(engine: EngineControl, manifest: AdapterManifest, *, timeout_s: float) -> None:
    try:
        await engine.load_adapter(manifest.name, manifest.folder, timeout_s=timeout_s)
    except BusyError:
        raise
    except RefusedError:  # perhaps because of one of this name that an earlier run has left there
        await engine.unload_adapter(manifest.name, timeout_s=timeout_s)
        await engine.load_adapter(manifest.name, manifest.folder, timeout_s=timeout_s)


async def install(
    engine: EngineControl,
    manifest: AdapterManifest,
    *,
    judge: Judge,
    timeout_s: float,
    patience_s: float,
    make_room: Callable[[], Awaitable[None]] = _do_nothing,
) -> Installed:
    """Load an adapter on one engine and prove it.

    Args:
        judge: says what its proof is worth.
        timeout_s: of each call.
        patience_s: how long a full engine is asked again.
        make_room: called before each attempt; may raise BusyError, too.

    Raises:
        BusyError: its adapters stayed in use; RefusedError: it takes no such adapter; ProofError: it samples something else.
        EngineError, DeadlineError: it failed.
    """
    give_up_s, num_retries = time.monotonic() + patience_s, 0
    while True:
        try:
            await make_room()
            await _load(engine, manifest, timeout_s=timeout_s)
            break
        except BusyError:
            if time.monotonic() >= give_up_s:
                raise
            num_retries += 1
            await asyncio.sleep(_BUSY_RETRY_S)
    try:
        proof = await engine.prove(manifest.canary, adapter=manifest.name, timeout_s=timeout_s)
        verdict = judge.judge(engine.name, manifest, proof, tenant=manifest.tenant)
        if not verdict.refused:
            return Installed(num_retries, verdict.gap, verdict.reason)
        reason = verdict.reason
    except RefusedError as exc:  # although it says that it has loaded it
        reason = str(exc)
    with suppress(OffbeatError):  # nobody routes to it; it only takes room
        await engine.unload_adapter(manifest.name, timeout_s=_UNLOAD_TIMEOUT_S)
    raise ProofError(f"{engine.name} failed its proof of {manifest.name}: {reason}")
