"""Publishes the one adapter that a run trains: the ranks write it, then the fleet brings it to the engines. Torch-free.

No rank is in a barrier while engines load: writing is the ranks' last part. The loop sees the same protocol as for whole weights.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from offbeat.inference.fleet import AdapterFleet
from offbeat.types import Version
from offbeat.weights.adapters import AdapterManifest
from offbeat.weights.channels import DiskChannel
from offbeat.weights.protocol import Manifest
from offbeat.weights.publish import PublishReport

POLICY = "policy"
"""The name of the tenant that a run trains."""


@dataclass(frozen=True)
class LoraPublisher:
    """Carries the run's adapter to the fleet."""

    fleet: AdapterFleet
    channel: DiskChannel

    async def publish(self, version: Version) -> PublishReport:
        """Write the adapter as `version` and bring it to the engines.

        Raises:
            PublishError: no engine serves it; gives each engine's reason.
        """
        start = time.monotonic()
        manifest = await self.channel.write(version)
        written = time.monotonic()
        report = await self.fleet.publish(policy_manifest(manifest))
        end = time.monotonic()
        failed = {engine: delivery.reason for engine, delivery in report.deliveries.items() if delivery.reason}
        return PublishReport(
            version, total_s=end - start, write_s=written - start, stage_s=report.total_s, switch_s=0.0, canary_gap=report.canary_gap,
            serving=tuple(report.serving), quarantined=failed)


def policy_manifest(manifest: Manifest) -> AdapterManifest:
    """What the trainer wrote, as an adapter of the policy."""
    num_bytes = sum(file.stat().st_size for file in Path(manifest.folder).glob("*.safetensors"))
    return AdapterManifest(
        POLICY, manifest.version, manifest.folder, manifest.fingerprint, manifest.canary, manifest.canary_logprob, num_bytes)
