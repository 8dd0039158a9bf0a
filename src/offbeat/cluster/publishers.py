"""How a run's versions reach the engines: as whole weights, or as the one adapter that a run trains. Torch-free.

Chosen in `cluster.assemble`; the loop sees `Publishing`. Engines serve whole weights when `publish` returns.

    the fan-out   of an adapter consumes what the ranks wrote; produces the version on the engines; waits for each under its own deadline,
                  while the loop and all ranks go on; `settle` waits for it
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from offbeat.cluster.session import OnServed
from offbeat.fleet.adapters import AdapterFleet
from offbeat.phase import phase
from offbeat.types import Version
from offbeat.weights.adapters import AdapterManifest
from offbeat.weights.channels import DiskChannel
from offbeat.weights.protocol import Manifest
from offbeat.weights.publish import Publisher, PublishReport

POLICY = "policy"
"""The tenant that a run trains, before a dot and the run's incarnation."""

Release = Callable[[PublishReport | None], Awaitable[None]]
"""Lets the ranks that wait for this process go on, and tells them how the publish went, if it is over."""


async def release_nobody(_report: PublishReport | None) -> None:
    """A controller's ranks wait for nothing."""


@dataclass(frozen=True)
class WholePublisher:
    """Whole weights: engines switch together, so the ranks go on when it is done."""

    publisher: Publisher
    release: Release = release_nobody

    async def publish(self, version: Version, *, on_served: OnServed) -> None:
        """See `Publishing.publish`; `on_served` has heard when this returns.

        Raises:
            PublishError: too few engines serve the version.
        """
        report = await self.publisher.publish(version)
        await self.release(report)
        on_served(report)

    async def settle(self) -> None:
        """See `Publishing.settle`: nothing is left to wait for."""


class LoraPublisher:
    """The run's adapter: the ranks go on when it is written. Use as `async with`; leaving gives up a version on its way."""

    def __init__(self, fleet: AdapterFleet, channel: DiskChannel, *, tenant: str, release: Release = release_nobody) -> None:
        self._fleet = fleet
        self._tenant = tenant
        self._channel = channel
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
        manifest = await self._channel.write(version)
        written = time.monotonic()
        await self._release(None)
        self._fanout = asyncio.create_task(
            self._fan_out(manifest, on_served, start=start, written=written), name=f"fan-out of version {version}")

    async def settle(self) -> None:
        """See `Publishing.settle`.

        Raises:
            PublishError: no engine serves the version published last; gives each engine's reason.
        """
        if self._fanout is not None:
            with phase("waiting for engines to load the adapter"):
                await self._fanout

    async def _fan_out(self, manifest: Manifest, on_served: OnServed, *, start: float, written: float) -> None:
        report = await self._fleet.publish(policy_manifest(manifest, self._tenant))
        failed = {engine: delivery.reason for engine, delivery in report.deliveries.items() if delivery.reason}
        on_served(PublishReport(
            manifest.version, total_s=time.monotonic() - start, write_s=written - start, stage_s=report.total_s, switch_s=0.0,
            canary_gap=report.canary_gap, serving=tuple(report.serving), quarantined=failed,
            inconclusive=report.inconclusive))


def policy_tenant(incarnation: str) -> str:
    """What the run trains is called in engines: names such as policy.3fa9c1@12, which no other start of a run has used."""
    return f"{POLICY}.{incarnation}"


def is_policy(adapter: str) -> bool:
    """Whether an adapter's name is one of a run's policy, of any run and any start of it."""
    tenant, at, _ = adapter.rpartition("@")
    return bool(at) and (tenant == POLICY or tenant.startswith(f"{POLICY}."))


def policy_manifest(manifest: Manifest, tenant: str) -> AdapterManifest:
    """What the trainer wrote, as an adapter of the policy."""
    num_bytes = sum(file.stat().st_size for file in Path(manifest.folder).glob("*.safetensors"))
    return AdapterManifest(
        tenant, manifest.version, manifest.folder, manifest.fingerprint, manifest.canary, manifest.canary_logprobs, num_bytes)
