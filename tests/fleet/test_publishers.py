"""Whole weights and adapters reach engines, also engines that misbehave; what an engine does not sample it never serves."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heard import Heard
from offbeat.config.weights import WeightsConfig
from offbeat.data import wire
from offbeat.engine.options import EngineOptions
from offbeat.engine.server import EngineServer
from offbeat.errors import BusyError, EngineError, ProofError, PublishError, RefusedError
from offbeat.fleet.adapters import AdapterCache
from offbeat.fleet.dispatch import Dispatcher
from offbeat.fleet.members import State
from offbeat.fleet.pool import EnginePool
from offbeat.fleet.publication import PublishReport
from offbeat.fleet.publishers import AdapterPublisher, Fanouts, PolicyPublisher, WeightsPublisher, WrittenVersion
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.sampling import Sampling
from offbeat.model.peft_io import Adapter, write_adapter
from offbeat.weights.adapters import policy_adapter
from offbeat.weights.channels import Channel
from offbeat.weights.proof import ProofJudge
from offbeat.weights.protocol import Manifest, Proof
from waiting import until

MANIFEST = Manifest(version=5, folder="v5", fingerprint="new", canary=(1, 2, 3), canary_logprobs=(-1.0, -1.0))


# -- whole weights ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """An engine in memory. `lazy` acknowledges a switch and goes on with the old weights; `hang` never answers."""

    name: str
    fault: str = ""
    served: Manifest = Manifest(4, "v4", "old", (1, 2, 3), (-2.0, -2.0))
    staged: dict[int, Manifest] = field(default_factory=dict)

    async def stage(self, manifest: Manifest, *, timeout_s: float) -> None:
        if self.fault == "refuse":
            raise EngineError(f"{self.name}: no such folder")
        if self.fault == "hang":
            async with asyncio.timeout(None):
                await asyncio.sleep(timeout_s)
            raise EngineError(f"{self.name} did not answer in {timeout_s:g} s")
        self.staged[manifest.version] = manifest

    async def switch(self, manifest: Manifest, *, interrupt: str, timeout_s: float) -> None:
        if self.fault != "lazy":
            self.served = self.staged[manifest.version]

    async def prove(self, canary: tuple[int, ...], *, timeout_s: float, adapter: str = "") -> Proof:
        version = 5 if self.fault == "lazy" else self.served.version
        return Proof(version, self.served.fingerprint, self.served.canary_logprobs)


class OneVersion:
    """A channel that writes nothing, and gives the one manifest."""

    async def write(self, version: int, *, num_receivers: int = 0) -> Manifest:
        assert version == MANIFEST.version
        return MANIFEST

    async def rewrite(self, manifest: Manifest) -> Manifest | None:
        return None

    def prune(self, served: int) -> None:
        pass


def pool_of(*engines: Engine, **options: Any) -> tuple[EnginePool, dict[str, str]]:
    """A pool, and the reasons of its quarantines."""
    heard = Heard()
    return EnginePool(engines, listener=heard, **options), heard.quarantines


def publisher(pool: EnginePool, channel: object = None, **options: Any) -> WeightsPublisher:
    return WeightsPublisher(pool, channel or OneVersion(), WeightsConfig(stage_timeout_s=0.2), judge=ProofJudge(tolerance=1e-3), **options)


async def published(publish: WeightsPublisher, version: int = 5) -> PublishReport:
    """How publishing a version went, once engines serve it."""
    reports: list[PublishReport] = []
    async with publish:
        await publish.publish(version, on_served=reports.append)
        await publish.settle()
    return reports[0]


def serving(pool: EnginePool) -> dict[str, int | None]:
    """Versions of the engines that serve."""
    return {name: member.version for name, member in pool.members.items() if member.state is State.SERVING}


@pytest.mark.parametrize(("fault", "reason"), [
    ("refuse", "no such folder"), ("hang", "did not answer"), ("lazy", "fingerprint old instead of new"),
])
def test_a_bad_engine_is_quarantined_and_the_others_serve(fault: str, reason: str) -> None:
    async def main() -> None:
        pool, quarantined = pool_of(Engine("a"), Engine("b", fault), Engine("c"))
        report = await published(publisher(pool))
        assert serving(pool) == {"a": 5, "c": 5}
        assert reason in quarantined["b"]
        assert dict(report.quarantined) == quarantined
        assert min(report.total_s, report.write_s, report.stage_s, report.switch_s) >= 0

    asyncio.run(main())


def test_too_few_engines_fail_the_publish_with_each_reason() -> None:
    async def main() -> None:
        pool, _ = pool_of(Engine("a", "lazy"), Engine("b", "refuse"))
        with pytest.raises(PublishError, match=r"served by 0 engines.*b: staging failed: b: no such folder; a: its weights"):
            await published(publisher(pool))
        assert serving(pool) == {}

    asyncio.run(main())


def test_an_engine_is_brought_to_what_is_current_and_proven() -> None:
    async def main() -> None:
        pool, _ = pool_of(Engine("a"))
        publish = publisher(pool)
        out, lazy = Engine("out"), Engine("out", "lazy")
        assert await publish.bring(out) is None  # nothing was published
        await published(publish)
        assert await publish.bring(out) == 5
        assert out.served == MANIFEST
        with pytest.raises(ProofError, match="out failed its proof: its weights have fingerprint old instead of new"):
            await publish.bring(lazy)
        with pytest.raises(EngineError, match="no such folder"):
            await publish.bring(Engine("out", "refuse"))
        assert serving(pool) == {"a": 5}  # who brings it admits it

    asyncio.run(main())


@pytest.mark.parametrize("gone", [False, True])
def test_an_engine_that_heals_during_a_publish_ends_at_the_new_version(gone: bool) -> None:
    """`gone`: the old version's folder is removed as soon as the new one is being written."""
    older, newer = replace(MANIFEST, version=4), MANIFEST

    class Versions(OneVersion):
        async def write(self, version: int, *, num_receivers: int = 0) -> Manifest:
            await asyncio.sleep(0.05)
            return {4: older, 5: newer}[version]

    class Slow(Engine):
        async def stage(self, manifest: Manifest, *, timeout_s: float) -> None:
            await asyncio.sleep(0.02)
            if gone and manifest is older and writing:
                raise EngineError("the folder is gone")
            await super().stage(manifest, timeout_s=timeout_s)

        async def prove(self, canary: tuple[int, ...], *, timeout_s: float, adapter: str = "") -> Proof:
            await asyncio.sleep(0.02)
            return await super().prove(canary, timeout_s=timeout_s)

    engine, writing = Slow("healing"), False

    async def main() -> None:
        nonlocal writing
        pool, _ = pool_of(Engine("a"))
        publish = publisher(pool, Versions())
        await published(publish, 4)
        writing = True
        publishing = asyncio.create_task(published(publish))
        await asyncio.sleep(0.02 if gone else 0.03)
        assert await publish.bring(engine) == 5
        await publishing
        assert engine.served.version == newer.version and serving(pool) == {"a": 5}

    asyncio.run(main())


def test_a_publish_below_min_engines_waits_for_engines_to_heal() -> None:
    async def heal(pool: EnginePool) -> None:
        await pool.wait_quarantined("a")
        pool.mark_healing("a")
        pool.restore("a", 5)

    async def main() -> None:
        pool, _ = pool_of(Engine("a", "lazy"), heal_timeout_s=60.0)
        healing = asyncio.create_task(heal(pool))
        report = await published(publisher(pool))
        assert report.serving == ("a",) and list(report.quarantined) == ["a"]
        await healing
        hopeless, _ = pool_of(Engine("a", "lazy"), heal_timeout_s=0.05)
        with pytest.raises(PublishError, match="served by 0 engines, .* a: its weights have .* old .*; no engine can serve: a: its"):
            await published(publisher(hopeless))

    asyncio.run(main())


def test_an_engine_whose_proof_shows_nothing_serves_and_the_report_says_why() -> None:
    class Silent(Engine):
        async def prove(self, canary: tuple[int, ...], *, timeout_s: float, adapter: str = "") -> Proof:
            return replace(await super().prove(canary, timeout_s=timeout_s), fingerprint=None)

    async def main() -> None:
        pool, quarantined = pool_of(Silent("a"), Engine("b"))
        report = await published(publisher(pool))
        assert serving(pool) == {"a": 5, "b": 5} and not quarantined
        assert report.proofs == {"not_proven": 1, "by_weights": 1}
        assert list(report.inconclusive) == ["a"] and "its first proof shows its noise" in report.inconclusive["a"]
        assert wire.decode(PublishReport, wire.encode(report)) == report

    asyncio.run(main())


@pytest.mark.parametrize("waits", [False, True])
def test_ranks_are_let_go_when_weights_are_written_or_learn_who_serves_them_where_they_roll_out(waits: bool) -> None:
    heard: list[tuple[str, PublishReport | None]] = []

    async def release(told: PublishReport | None) -> None:
        heard.append(("ranks", told))

    async def main() -> None:
        pool, _ = pool_of(Engine("a"))
        async with publisher(pool, release=release, waits=waits) as publish:
            await publish.publish(5, on_served=lambda told: heard.append(("loop", told)))
            assert serving(pool) == ({"a": 5} if waits else {}) and len(heard) == 1 + waits
            await publish.settle()
            (_, told), (_, report) = heard
            assert serving(pool) == {"a": 5} and [who for who, _ in heard] == ["ranks", "loop"]
            assert report is not None and report.serving == ("a",) and told == (report if waits else None)

    asyncio.run(main())


class Numbered(OneVersion):
    """A channel of versions with fingerprints of their own, which notes up to where they may be removed."""

    def __init__(self) -> None:
        self.served: list[int] = []

    async def write(self, version: int, *, num_receivers: int = 0) -> Manifest:
        return replace(MANIFEST, version=version, fingerprint=f"of {version}", folder=f"v{version}")

    def prune(self, served: int) -> None:
        self.served.append(served)


@dataclass
class Paced(Engine):
    """An engine that stages a version when it is let, unless the version is gone by then, and notes what it began to stage."""

    may: asyncio.Event = field(default_factory=asyncio.Event)
    gone: set[int] = field(default_factory=set)
    begun: list[int] = field(default_factory=list)

    async def stage(self, manifest: Manifest, *, timeout_s: float) -> None:
        self.begun.append(manifest.version)
        await self.may.wait()
        if manifest.version in self.gone:
            raise EngineError(f"{self.name}: {manifest.folder} is not there")
        await super().stage(manifest, timeout_s=timeout_s)


@pytest.mark.parametrize("gone", [False, True])
def test_a_slow_engine_keeps_no_other_from_new_versions_and_goes_on_with_the_newest(gone: bool) -> None:
    """`gone`: what it began to read is removed meanwhile, which is not its fault."""

    async def main() -> None:
        fast, slow = Paced("fast"), Paced("slow")
        fast.may.set()
        pool, quarantined = pool_of(fast, slow)
        served: list[int] = []
        channel = Numbered()
        async with publisher(pool, channel) as publish:
            for version in (5, 6, 7):
                await publish.publish(version, on_served=lambda report: served.append(report.version))
                await until(lambda version=version: serving(pool).get("fast") == version)
            assert served == channel.served == [] and slow.begun == [5], "a version counts as served when the slowest engine has it"
            await publish.settle(behind=3)
            settling = asyncio.create_task(publish.settle(behind=2))
            await asyncio.sleep(0)
            assert not settling.done(), "no engine may be further behind"
            slow.gone = {5} if gone else set()
            slow.may.set()
            await settling
            await publish.settle()
            assert served == sorted(channel.served) == [5, 6, 7] and slow.begun == [5, 7]
            assert serving(pool) == {"fast": 7, "slow": 7} and not quarantined

    asyncio.run(main())


def test_a_publish_that_fails_in_the_background_is_raised_to_whoever_watches_waits_or_publishes_the_next() -> None:
    wrong = r"version 5 is served by 0 engines, fewer than the 1 needed: a: its weights have fingerprint old"

    async def main() -> None:
        pool, _ = pool_of(Engine("a", "lazy"))
        async with publisher(pool, Numbered()) as publish:
            watching = asyncio.create_task(publish.watch())
            await publish.publish(5)
            with pytest.raises(PublishError, match=wrong):
                await watching
            for wait in (publish.settle(), publish.settle(behind=4)):
                with pytest.raises(PublishError, match=wrong):
                    await wait

    asyncio.run(main())


def test_a_failure_is_raised_at_once_though_an_earlier_version_is_still_on_its_way() -> None:
    class Failing(Fanouts):
        async def _fan_out(self, written: WrittenVersion) -> PublishReport:
            if written.manifest.version == 5:
                await asyncio.Event().wait()
            raise PublishError("nobody takes it")

    async def main() -> None:
        async with Failing() as fanouts:
            for version in (5, 6):
                fanouts.fan_out(WrittenVersion(replace(MANIFEST, version=version), 0.0, 0.0), lambda _report: None)
            with pytest.raises(PublishError, match="nobody takes it"):
                await fanouts.watch()

    asyncio.run(main())


def test_several_may_wait_for_the_same_versions() -> None:
    async def main() -> None:
        slow = Paced("slow")
        pool, _ = pool_of(slow)
        async with publisher(pool, Numbered()) as publish:
            for version in (5, 6):
                await publish.publish(version)
            waiting = [asyncio.create_task(publish.settle(behind=behind)) for behind in (0, 1, 0)]
            await asyncio.sleep(0.01)
            slow.may.set()
            await asyncio.gather(*waiting)
            assert serving(pool) == {"slow": 6}

    asyncio.run(main())


def test_leaving_gives_up_what_is_on_its_way() -> None:
    async def main() -> None:
        slow = Paced("slow")
        pool, quarantined = pool_of(slow)
        async with publisher(pool, Numbered()) as publish:
            await publish.publish(5)
            await until(lambda: slow.begun == [5])
        assert len(asyncio.all_tasks()) == 1 and serving(pool) == {} and not quarantined

    asyncio.run(main())


# -- adapters --------------------------------------------------------------------------------------------------------------------------


ALICE = replace(MANIFEST, adapter="alice", version=3, fingerprint="right", num_bytes=100)


@dataclass
class AdapterEngine:
    """An engine in memory that loads adapters, with a fault."""

    name: str
    fault: str = ""
    folders: dict[str, str] = field(default_factory=dict)
    num_busy: int = 0

    async def load_adapter(self, name: str, folder: str, *, timeout_s: float) -> None:
        if self.fault == "hang":
            await asyncio.sleep(60)
        if self.fault == "refuse":
            raise RefusedError(f"{self.name} answered with 400: rank 99 is too large")
        if self.fault == "die":
            raise EngineError(f"{self.name} cannot be reached")
        if self.num_busy:
            self.num_busy -= 1
            raise BusyError(f"{self.name} answered with 429: full")
        await asyncio.sleep(0.2 if self.fault == "slow" else 0.0)
        self.folders[name] = folder

    async def unload_adapter(self, name: str, *, timeout_s: float) -> None:
        self.folders.pop(name, None)

    async def prove(self, canary: tuple[int, ...], *, timeout_s: float, adapter: str = "") -> Proof:
        assert canary == ALICE.canary and adapter in self.folders
        if self.fault == "forget":
            raise RefusedError(f"{self.name} answered with 404: no adapter {adapter}")
        return Proof(3, "wrong" if self.fault == "lazy" else "right", (-1.0005,) * 2 if self.fault == "slow" else (-1.0,) * 2)


@dataclass
class Published:
    """How a publish of `ALICE` went: the report or the error, the events, and who was quarantined."""

    report: PublishReport | None
    error: str
    fanouts: list[dict[str, Any]]
    quarantined: dict[str, str]


def publish(*engines: AdapterEngine, timeout_s: float = 60.0) -> Published:
    async def main() -> Published:
        pool = EnginePool(engines, listener=(heard := Heard()))
        async with AdapterCache(pool, capacity=4, judge=ProofJudge(tolerance=1e-3), timeout_s=timeout_s) as cache:
            adapters = AdapterPublisher(pool, cache)
            try:
                report, error = await adapters.publish(ALICE), ""
                assert cache.catalog.find("alice") is ALICE
            except PublishError as exc:
                report, error = None, str(exc)
        return Published(report, error, [each for each in heard.events if each["kind"] == "fanout"], heard.quarantines)

    return asyncio.run(main())


def test_every_engine_takes_an_adapter_at_its_own_pace() -> None:
    engines = AdapterEngine("a", "slow"), AdapterEngine("b"), AdapterEngine("c", num_busy=1)
    published = publish(*engines)
    report, (fanout,) = published.report, published.fanouts
    assert report is not None and sorted(report.serving) == ["a", "b", "c"] and report.serving[0] == "b"
    assert not report.quarantined and not published.quarantined
    assert all(engine.folders == {"alice@3": MANIFEST.folder} for engine in engines)
    told = fanout["engines"]
    assert (fanout["kind"], fanout["adapter"], fanout["num_bytes"]) == ("fanout", "alice@3", 100)
    assert {name: (one["retries"], one["reason"]) for name, one in told.items()} == {"a": (0, ""), "b": (0, ""), "c": (1, "")}
    assert told["b"]["seconds"] < told["a"]["seconds"] <= fanout["total_s"] + 1e-4 and fanout["total_s"] >= 0.2
    assert (report.version, report.write_s, report.stage_s) == (3, 0.0, report.total_s)
    assert report.canary_gap == pytest.approx(0.0005)


@pytest.mark.parametrize(("fault", "reason"), [
    ("refuse", "rank 99 is too large"), ("hang", "alice@3 on bad passed its deadline of 1.2 s"), ("die", "cannot be reached"),
    ("lazy", "failed its proof of alice@3: its weights have fingerprint wrong instead of right"),
    ("forget", "failed its proof of alice@3: bad answered with 404"),
])
def test_one_engine_that_fails_is_blamed_and_the_adapter_is_served_by_the_others(fault: str, reason: str) -> None:
    bad = AdapterEngine("bad", fault)
    published = publish(bad, AdapterEngine("slow", "slow"), AdapterEngine("good"), timeout_s=1.2)
    assert published.report is not None and published.report.serving == ("good", "slow")
    assert list(published.quarantined) == ["bad"] and reason in published.quarantined["bad"]
    assert published.report.quarantined == published.quarantined
    assert not bad.folders


@pytest.mark.parametrize("fault", ["refuse", "lazy"])
def test_an_adapter_that_no_engine_takes_is_bad_and_no_engine_is_blamed(fault: str) -> None:
    published = publish(AdapterEngine("a", fault), AdapterEngine("b", fault))
    assert published.error.startswith("the adapter alice@3 is bad: no engine takes it; a: ") and "; b: " in published.error
    assert not published.quarantined and len(published.fanouts) == 1


def test_a_dead_engine_is_blamed_beside_an_adapter_that_is_bad() -> None:
    published = publish(AdapterEngine("a", "refuse"), AdapterEngine("b", "die"))
    assert "is bad" in published.error and list(published.quarantined) == ["b"]


def test_no_engine_left_fails_the_publish_with_each_reason() -> None:
    published = publish(AdapterEngine("a", "hang"), AdapterEngine("b", "die"), timeout_s=0.1)
    assert sorted(published.quarantined) == ["a", "b"] and len(published.fanouts) == 1
    for reason in ("alice@3 could not be published: no engine can serve", "alice@3 on a passed its deadline of 0.1 s", "b: b cannot be"):
        assert reason in published.error


def test_an_engine_that_stays_full_is_not_to_blame_and_is_asked_once_more() -> None:
    start = time.monotonic()
    published = publish(AdapterEngine("full", num_busy=10**9), timeout_s=2.0)
    assert time.monotonic() - start >= 2.0  # half of the timeout, twice
    assert not published.quarantined and len(published.fanouts) == 2
    assert published.error == "the adapter alice@3 is served by no engine: none is left; full: full answered with 429: full"


# -- the run's adapter -----------------------------------------------------------------------------------------------------------------


CANARY = (5, 6, 7, 8)
POLICY = policy_adapter("3fa9c1")
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


@dataclass
class Scene:
    """What a body plays with: the publisher over one real engine, and whether that may load."""

    publisher: PolicyPublisher
    cache: AdapterCache
    dispatcher: Dispatcher
    gate: asyncio.Event

    @property
    def current(self) -> str:
        """The version that serves; "" before the first."""
        try:
            return self.cache.catalog.find(POLICY).name
        except RefusedError:
            return ""


class Stage:
    """Plays scenes; the trainer's side writes random adapters, and tells a wrong log-probability of version `BAD`."""

    def __init__(self, server: EngineServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.served: list[PublishReport] = []
        self.released: list[PublishReport | None] = []

    async def write_weights(
        self, version: int, folder: Path, *, canary: tuple[int, ...], num_receivers: int = 0, base: str = "",
    ) -> Manifest:
        generator = torch.Generator().manual_seed(version)
        pair = (torch.randn(4, 32, generator=generator), torch.randn(32, 4, generator=generator))
        adapter = Adapter(4, 0.1, {"model.layers.0.self_attn.o_proj": pair})
        write_adapter(adapter, folder, base_model="base")
        await asyncio.to_thread(self.server._loop.hold_adapter, f"probe@{version}", str(folder))
        _, logprobs = self.server._engine.score(list(canary), adapter=f"probe@{version}")
        gap = 0.5 if version == BAD else 0.0
        return Manifest(version, str(folder), adapter.fingerprint(), canary, tuple(logprob + gap for logprob in logprobs))

    def holds(self, version: int) -> bool:
        return False

    async def release(self, report: PublishReport | None) -> None:
        self.released.append(report)

    def play(self, body: Callable[[Scene], Awaitable[None]]) -> None:
        async def main(url: str) -> None:
            async with EngineSession() as http:
                client = Gated("engine 0", url, http.session)
                client.gate = asyncio.Event()
                pool = EnginePool([client])
                async with AdapterCache(pool, capacity=8, judge=ProofJudge(tolerance=1e-3), timeout_s=60) as cache:
                    channel = Channel(self.folder, WeightsConfig(), canary=CANARY, incarnation="3fa9c1", writer=self)
                    dispatcher = Dispatcher(pool, request_timeout_s=60, adapters=cache)
                    adapters = AdapterPublisher(pool, cache)
                    async with PolicyPublisher(adapters, channel, adapter=POLICY, release=self.release) as publisher:
                        await body(Scene(publisher, cache, dispatcher, client.gate))
            assert len(asyncio.all_tasks()) == 1, "a task was left behind"

        asyncio.run(main(self.server.start()))


def test_each_version_is_served_under_its_own_name_until_one_is_bad(tmp_path: Path, server: EngineServer) -> None:
    stage = Stage(server, tmp_path / "weights")

    async def body(scene: Scene) -> None:
        scene.gate.set()
        publisher = scene.publisher
        await publisher.settle()
        for version in (0, 1):
            await publisher.publish(version, on_served=stage.served.append)
            await publisher.settle()
            report = stage.served[-1]
            assert (report.version, report.serving, report.quarantined) == (version, ("engine 0",), {})
            assert report.canary_gap < 1e-4 and report.total_s >= report.write_s + report.stage_s and report.write_s > 0
            assert scene.current == f"policy.3fa9c1@{version}"
            (sample,) = await scene.dispatcher.generate((5, 6), Sampling(3), n=1, adapter=POLICY)
            assert set(sample.versions) == {version}
        await publisher.publish(BAD, on_served=stage.served.append)
        for _ in range(2):
            with pytest.raises(PublishError, match=r"policy.3fa9c1@2 is bad.*off by 0\.5"):
                await publisher.settle()
        with pytest.raises(PublishError, match=r"policy.3fa9c1@2 is bad.*off by 0\.5"):
            await publisher.publish(3, on_served=stage.served.append)
        assert scene.current == "policy.3fa9c1@1" and not list(stage.folder.glob("v00000003*"))

    stage.play(body)
    assert [report.version for report in stage.served] == [0, 1]


def test_the_ranks_are_let_go_before_an_engine_has_loaded_and_leaving_gives_the_version_up(tmp_path: Path, server: EngineServer) -> None:
    stage = Stage(server, tmp_path / "weights")

    async def body(scene: Scene) -> None:
        await scene.publisher.publish(0, on_served=stage.served.append)
        assert stage.released == [None] and not scene.current and not stage.served
        scene.gate.set()
        await scene.publisher.settle()
        assert scene.current == "policy.3fa9c1@0" and len(stage.served) == 1
        scene.gate.clear()
        await scene.publisher.publish(1, on_served=stage.served.append)

    stage.play(body)
    assert len(stage.served) == 1 and stage.released == [None, None]
