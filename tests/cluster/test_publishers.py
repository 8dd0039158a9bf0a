"""The run's adapter reaches the engines under its own name while the ranks go on, and an engine that does not sample it never serves it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offbeat.cluster.publishers import LoraPublisher, WholePublisher, is_policy, policy_tenant
from offbeat.errors import PublishError
from offbeat.fleet.adapters import AdapterFleet
from offbeat.fleet.pool import EnginePool
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.embedded.options import EngineOptions
from offbeat.inference.embedded.server import EngineServer
from offbeat.inference.sampling import Sampling
from offbeat.model.peft_io import Adapter, write_adapter
from offbeat.weights.channels import DiskChannel
from offbeat.weights.proof import Judge
from offbeat.weights.protocol import Manifest
from offbeat.weights.publish import PublishReport

CANARY = (5, 6, 7, 8)
POLICY = policy_tenant("3fa9c1")
BAD = 2


class Gated(EngineClient):
    """A client whose engine begins to load an adapter when `gate` is set."""

    gate: asyncio.Event

    async def load_adapter(self, name: str, folder: str, *, timeout_s: float) -> None:
        await self.gate.wait()
        await super().load_adapter(name, folder, timeout_s=timeout_s)


@pytest.fixture
def server(model_dir: str) -> Iterator[EngineServer]:
    server = EngineServer(EngineOptions(model=model_dir))
    yield server
    server.stop()


class Scene:
    """A publisher over one real engine; the trainer's side writes random adapters, and tells a wrong log-probability of version `BAD`."""

    def __init__(self, server: EngineServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.served: list[PublishReport] = []
        self.released: list[PublishReport | None] = []

    async def write(self, version: int, folder: Path, *, canary: tuple[int, ...], num_receivers: int = 0) -> Manifest:
        generator = torch.Generator().manual_seed(version)
        pair = (torch.randn(4, 32, generator=generator), torch.randn(32, 4, generator=generator))
        adapter = Adapter(4, 0.1, {"model.layers.0.self_attn.o_proj": pair})
        write_adapter(adapter, folder, base_model="base")
        await asyncio.to_thread(self.server._loop.load_adapter, f"probe@{version}", str(folder))
        _, logprobs = self.server._engine.score(list(canary), adapter=f"probe@{version}")
        gap = 0.5 if version == BAD else 0.0
        return Manifest(version, str(folder), adapter.fingerprint(), canary, tuple(logprob + gap for logprob in logprobs))

    async def release(self, report: PublishReport | None) -> None:
        self.released.append(report)

    def play(self, body) -> None:
        """Run `body(publisher, fleet, gate)`."""

        async def main(url: str) -> None:
            async with EngineSession() as http:
                client = Gated("engine 0", url, http.session)
                client.gate = asyncio.Event()
                pool = EnginePool([client], request_timeout_s=10)
                async with AdapterFleet(pool, capacity=8, judge=Judge(tolerance=1e-3), timeout_s=10) as fleet:
                    channel = DiskChannel(self.folder, keep=2, canary=CANARY, write=self.write, incarnation="3fa9c1")
                    async with LoraPublisher(fleet, channel, tenant=POLICY, release=self.release) as publisher:
                        await body(publisher, fleet, client.gate)
            assert len(asyncio.all_tasks()) == 1, "a task was left behind"

        asyncio.run(main(self.server.start()))


def test_each_version_is_served_under_its_own_name_until_one_is_bad(tmp_path: Path, server: EngineServer) -> None:
    scene = Scene(server, tmp_path / "weights")

    async def body(publisher: LoraPublisher, fleet: AdapterFleet, gate: asyncio.Event) -> None:
        gate.set()
        await publisher.settle()
        for version in (0, 1):
            await publisher.publish(version, on_served=scene.served.append)
            await publisher.settle()
            report = scene.served[-1]
            assert (report.version, report.serving, report.quarantined) == (version, ("engine 0",), {})
            assert report.canary_gap < 1e-4 and report.total_s >= report.write_s + report.stage_s
            assert fleet.current(POLICY) == f"policy.3fa9c1@{version}"
            (sample,) = await fleet.generate(POLICY, (5, 6), Sampling(3), n=1)
            assert set(sample.versions) == {version}
        await publisher.publish(BAD, on_served=scene.served.append)
        for _ in range(2):
            with pytest.raises(PublishError, match=r"policy.3fa9c1@2 is bad.*off by 0\.5"):
                await publisher.settle()
        with pytest.raises(PublishError, match=r"policy.3fa9c1@2 is bad.*off by 0\.5"):
            await publisher.publish(3, on_served=scene.served.append)
        assert fleet.current(POLICY) == "policy.3fa9c1@1" and not list(scene.folder.glob("v00000003*"))

    scene.play(body)
    assert [report.version for report in scene.served] == [0, 1]


def test_the_ranks_are_let_go_before_an_engine_has_loaded_and_leaving_gives_the_version_up(tmp_path: Path, server: EngineServer) -> None:
    scene = Scene(server, tmp_path / "weights")

    async def body(publisher: LoraPublisher, fleet: AdapterFleet, gate: asyncio.Event) -> None:
        await publisher.publish(0, on_served=scene.served.append)
        assert scene.released == [None] and fleet.current(POLICY) is None and not scene.served
        gate.set()
        await publisher.settle()
        assert fleet.current(POLICY) == "policy.3fa9c1@0" and len(scene.served) == 1
        gate.clear()
        await publisher.publish(1, on_served=scene.served.append)

    scene.play(body)
    assert len(scene.served) == 1 and scene.released == [None, None]


def test_names_of_the_policy_are_told_from_tenants() -> None:
    assert all(map(is_policy, ("policy@3", "policy.3fa9c1@12"))) and not any(map(is_policy, ("policy", "policymaker@3", "alice@3")))


def test_whole_weights_are_served_when_publishing_them_returns_and_the_ranks_learn_how_it_went() -> None:
    heard: list[tuple[str, PublishReport | None]] = []
    report = PublishReport(3, 1.0, 0.1, 0.2, 0.3, 1e-7, ("engine 0",), {})

    class Whole:
        async def publish(self, version: int) -> PublishReport:
            assert version == 3
            return report

    async def release(told: PublishReport | None) -> None:
        heard.append(("ranks", told))

    async def body() -> None:
        publisher = WholePublisher(Whole(), release)
        await publisher.publish(3, on_served=lambda told: heard.append(("loop", told)))
        await publisher.settle()

    asyncio.run(body())
    assert heard == [("ranks", report), ("loop", report)]
