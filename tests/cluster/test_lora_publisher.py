"""The run's adapter reaches the engines under its own name, and an engine that does not sample it never serves it."""

import asyncio
from pathlib import Path

import pytest
import torch

from offbeat.cluster.lora_publisher import POLICY, LoraPublisher
from offbeat.errors import PublishError
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.embedded.options import EngineOptions
from offbeat.inference.embedded.server import EngineServer
from offbeat.inference.fleet import AdapterFleet
from offbeat.inference.pool import EnginePool
from offbeat.inference.sampling import Sampling
from offbeat.model.peft_io import Adapter, write_adapter
from offbeat.weights.channels import DiskChannel
from offbeat.weights.protocol import Manifest

CANARY = (5, 6, 7, 8)


def test_each_version_is_served_under_its_own_name_until_one_is_bad(tmp_path: Path, model_dir: str) -> None:
    server = EngineServer(EngineOptions(model=model_dir))

    async def write(version: int, folder: Path, *, canary: tuple[int, ...], num_receivers: int = 0) -> Manifest:
        generator = torch.Generator().manual_seed(version)
        pair = (torch.randn(4, 32, generator=generator), torch.randn(32, 4, generator=generator))
        adapter = Adapter(4, 0.1, {"model.layers.0.self_attn.o_proj": pair})
        write_adapter(adapter, folder, base_model=model_dir)
        await asyncio.to_thread(server._loop.load_adapter, f"probe@{version}", str(folder))
        _, logprobs = server._engine.score(list(canary), adapter=f"probe@{version}")
        gap = 0.5 if version == 2 else 0.0
        return Manifest(version, str(folder), adapter.fingerprint(), canary, sum(logprobs) / len(logprobs) + gap)

    async def main(url: str) -> None:
        async with EngineSession() as http:
            pool = EnginePool([EngineClient("engine 0", url, http.session)], request_timeout_s=10)
            async with AdapterFleet(pool, capacity=8, tolerance=1e-3, timeout_s=10) as fleet:
                publisher = LoraPublisher(fleet, DiskChannel(tmp_path / "weights", keep=2, canary=CANARY, write=write))
                for version in (0, 1):
                    report = await publisher.publish(version)
                    assert (report.version, report.serving, report.quarantined) == (version, ("engine 0",), {})
                    assert report.canary_gap < 1e-4 and fleet.current(POLICY) == f"policy@{version}"
                    (sample,) = await fleet.generate(POLICY, (5, 6), Sampling(3), n=1)
                    assert set(sample.versions) == {version}
                with pytest.raises(PublishError, match=r"policy@2 is bad.*off by 0\.5"):
                    await publisher.publish(2)
                assert fleet.current(POLICY) == "policy@1"

    try:
        asyncio.run(main(server.start()))
    finally:
        server.stop()
