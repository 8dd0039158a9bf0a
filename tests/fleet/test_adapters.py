"""The engines as a cache of adapters: engines in memory under random histories and balance, and real engines with real faults."""

import asyncio
import itertools
import json
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heard import Heard
from offbeat.errors import BusyError, EngineError, ProofError, PublishError, RefusedError
from offbeat.fleet.adapters import AdapterCache
from offbeat.fleet.dispatch import Dispatcher
from offbeat.fleet.health import Healer
from offbeat.fleet.listener import FleetListener
from offbeat.fleet.members import State
from offbeat.fleet.pool import EnginePool
from offbeat.fleet.publication import PublishReport
from offbeat.fleet.publishers import AdapterPublisher
from offbeat.inference.client import EngineClient, EngineSession
from offbeat.inference.sampling import PromptScore, Sample, Sampling
from offbeat.model.peft_io import Adapter, write_adapter
from offbeat.weights.adapters import split_adapter_name
from offbeat.weights.proof import ProofJudge
from offbeat.weights.protocol import Manifest, Proof
from waiting import until

PROMPT = (13, 14, 15)
SAMPLING = Sampling(3)


@dataclass
class Engine:
    """An engine in memory: holds `capacity` adapters, and knows nothing of an adapter that it does not hold.

    It answers after `pace_s`, or requests that find it `held_up` when that lets them go.
    """

    name: str
    capacity: int = 32
    pace_s: float = 0.0
    held_up: asyncio.Event | None = None
    fault: str = ""
    base_logprob: float = -2.0
    url: str = ""
    held: dict[str, str] = field(default_factory=dict)
    running: Counter[str] = field(default_factory=Counter)
    num_requests: int = 0
    num_unknown: int = 0
    loads: list[str] = field(default_factory=list)
    loading: int = 0
    most_loading: int = 0

    async def health(self, *, timeout_s: float) -> dict[str, Any]:
        if self.fault == "dead":
            raise EngineError(f"{self.name} cannot be reached")
        return {}

    async def generate(self, prompt: tuple[int, ...], sampling: Sampling, *, n: int, timeout_s: float, adapter: str = "") -> list[Sample]:
        await self.health(timeout_s=timeout_s)
        if adapter and adapter not in self.held:
            self.num_unknown += 1
            raise RefusedError(f"{self.name} answered with 404: no adapter {adapter}")
        self.num_requests += 1
        self.running[adapter] += 1
        try:
            await (self.held_up.wait() if self.held_up else asyncio.sleep(self.pace_s))
        finally:
            self.running[adapter] -= 1
        return [Sample((1,), (-1.0,), (split_adapter_name(adapter)[1] if adapter else 0,), adapter, "stop")] * n

    async def score(
        self, tokens: tuple[int, ...], *, adapter: str = "", top_k: int = 0, targets: object = None, draws: object = None,
        timeout_s: float,
    ) -> PromptScore:
        (sample,) = await self.generate(tokens, SAMPLING, n=1, timeout_s=timeout_s, adapter=adapter)
        return PromptScore((float("nan"),) + (-1.0,) * (len(tokens) - 1), sample.versions[0])

    async def load_adapter(self, name: str, folder: str, *, timeout_s: float) -> None:
        self.loading += 1
        self.most_loading = max(self.loading, self.most_loading)
        try:
            await self.health(timeout_s=timeout_s)
            await asyncio.sleep(60 if self.fault == "hung" else self.pace_s)
        finally:
            self.loading -= 1
        if "bad" in folder:
            raise RefusedError(f"{self.name} answered with 400: {folder} is no adapter")
        if name not in self.held and len(self.held) >= self.capacity:
            raise BusyError(f"{self.name} answered with 429: full")
        self.held[name] = folder
        self.loads.append(name)

    async def unload_adapter(self, name: str, *, timeout_s: float) -> None:
        assert not self.running[name], f"{name} is unloaded while a request uses it"
        self.held.pop(name, None)

    async def prove(self, canary: tuple[int, ...], *, timeout_s: float, adapter: str = "") -> Proof:
        await self.health(timeout_s=timeout_s)
        if not adapter:
            return Proof(0, "base", (self.base_logprob,))
        if adapter not in self.held:
            raise RefusedError("404")
        return Proof(split_adapter_name(adapter)[1], self.held[adapter], (-1.0,))


def manifest(tenant: str, version: int, *, folder: str = "") -> Manifest:
    """An engine in memory shows the folder as the adapter's fingerprint."""
    folder = folder or f"{tenant}-{version}"
    return Manifest(version, folder, folder, (1, 2), (-1.0,), adapter=tenant)


@dataclass(frozen=True)
class Fleet:
    """Engines, the adapters on them, and what sends requests and versions there."""

    pool: EnginePool
    cache: AdapterCache
    dispatcher: Dispatcher
    publisher: AdapterPublisher

    @property
    def publish(self) -> Callable[..., Awaitable[PublishReport]]:
        return self.publisher.publish

    async def ask(self, adapter: str) -> str:
        """What an adapter answers: its name, from engines in memory."""
        (sample,) = await self.dispatcher.generate(PROMPT, SAMPLING, n=1, adapter=adapter)
        return sample.text

    def current(self, adapter: str) -> str:
        """The name of the version that serves; "" where none does."""
        try:
            return self.cache.catalog.find(adapter).name
        except RefusedError:
            return ""


@asynccontextmanager
async def open_fleet(
    engines: Sequence[Any], *, capacity: int = 32, timeout_s: float = 60.0, heal_timeout_s: float = 0.0,
    listener: FleetListener | None = None,
) -> AsyncIterator[Fleet]:
    pool = EnginePool(engines, heal_timeout_s=heal_timeout_s, listener=listener)
    async with AdapterCache(pool, capacity=capacity, judge=ProofJudge(tolerance=1e-3), timeout_s=timeout_s) as cache:
        yield Fleet(pool, cache, Dispatcher(pool, request_timeout_s=60, adapters=cache), AdapterPublisher(pool, cache))


def using(engines: list[Engine], body: Callable[[Fleet], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with open_fleet(engines, **options) as fleet:
            await body(fleet)

    asyncio.run(main())


def test_a_tenant_is_served_by_its_newest_version_and_the_old_leaves_with_its_last_request() -> None:
    engines = [Engine(name, pace_s=0.02) for name in "ab"]

    async def body(fleet: Fleet) -> None:
        report = await fleet.publish(manifest("alice", 1))
        assert sorted(report.serving) == ["a", "b"]
        old = [asyncio.create_task(fleet.ask("alice")) for _ in range(4)]
        await asyncio.sleep(0.01)
        await fleet.publish(manifest("alice", 2))
        assert fleet.current("alice") == "alice@2"
        assert await fleet.ask("alice") == "alice@2"
        assert await asyncio.gather(*old) == ["alice@1"] * 4
        await until(lambda: all(list(engine.held) == ["alice@2"] for engine in engines))

    using(engines, body)


def test_an_old_version_that_is_asked_for_is_loaded_again_and_unknown_ones_are_refused() -> None:
    engines = [Engine(name) for name in "ab"]

    async def body(fleet: Fleet) -> None:
        for version in (1, 2, 3):
            await fleet.publish(manifest("alice", version))
        assert await fleet.ask("alice@2") == "alice@2"
        assert await fleet.ask("alice") == "alice@3"
        for unknown, hint in {"alice@1": "alice@3 is current", "alice@9": "alice@3 is current", "bob": "publish it first"}.items():
            with pytest.raises(RefusedError, match=f"there is no adapter '{unknown}'; {hint}"):  # the first is older than what is kept
                await fleet.ask(unknown)
        with pytest.raises(PublishError, match="alice@3 is not newer than alice@3"):
            await fleet.publish(manifest("alice", 3))
        fleet.cache.remove("alice")
        with pytest.raises(RefusedError, match="no adapter 'alice'; publish it first"):
            await fleet.ask("alice")
        await until(lambda: not any(engine.held for engine in engines))

    using(engines, body)


def test_a_tenant_that_returns_under_a_name_gets_nothing_of_the_one_before() -> None:
    engine = Engine("a")

    async def body(fleet: Fleet) -> None:
        await fleet.publish(manifest("alice", 1))
        engine.held_up = asyncio.Event()
        call = asyncio.create_task(fleet.ask("alice"))
        await until(lambda: engine.running["alice@1"])
        fleet.cache.remove("alice")
        with pytest.raises(PublishError, match="requests still use alice@1 of a removed adapter alice"):
            await fleet.publish(manifest("alice", 1, folder="another"))
        engine.held_up.set()
        assert await call == "alice@1"
        await until(lambda: not engine.held)
        await fleet.publish(manifest("alice", 1, folder="another"))
        assert engine.held == {"alice@1": "another"}

    using([engine], body)


@pytest.mark.parametrize(("capacity", "at_once"), [(32, 1), (32, 64), (8, 64), (4, 64)])
def test_equal_load_of_16_tenants_is_spread_evenly_over_4_engines(capacity: int, at_once: int) -> None:
    engines = [Engine(name, capacity, pace_s=0.001) for name in "abcd"]

    async def body(fleet: Fleet) -> None:
        await asyncio.gather(*(fleet.publish(manifest(f"t{i}", 1)) for i in range(16)))
        slots = asyncio.Semaphore(at_once)

        async def one(tenant: str) -> None:
            async with slots:
                assert await fleet.ask(tenant) == f"{tenant}@1"

        await asyncio.gather(*(one(f"t{i}") for _ in range(20) for i in range(16)))
        counts = [engine.num_requests for engine in engines]
        assert sum(counts) == 320
        assert max(counts) / (sum(counts) / 4) <= 1.1, counts

    using(engines, body, capacity=capacity)
    assert sum(engine.num_unknown for engine in engines) == 0


def test_more_adapters_than_fit_take_turns_and_no_request_meets_an_engine_that_lacks_its_adapter() -> None:
    engines = [Engine(name, 2, pace_s=0.001) for name in "ab"]

    async def body(fleet: Fleet) -> None:
        await asyncio.gather(*(fleet.publish(manifest(f"t{i}", 1)) for i in range(10)))
        answers = await asyncio.gather(*(fleet.ask(f"t{i}") for _ in range(5) for i in range(10)))
        assert answers == [f"t{i}@1" for _ in range(5) for i in range(10)]

    using(engines, body, capacity=2)
    assert not any(engine.num_unknown for engine in engines)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_through_publishes_faults_and_evictions_every_answer_is_of_a_version_that_was_asked_for(seed: int) -> None:
    chance = random.Random(seed)
    engines = [Engine(name, 4, pace_s=0.0005) for name in "abc"]
    published: dict[str, int] = dict.fromkeys("xyzuv", 0)
    pinned: list[str] = []
    numbers = itertools.count(1)

    async def body(fleet: Fleet) -> None:
        async def publish(tenant: str) -> None:
            version = published[tenant] = published[tenant] + 1
            bad = chance.random() < 0.2 and version > 1
            with suppress(PublishError):
                await fleet.publish(manifest(tenant, version, folder=f"bad {version}" if bad else ""))
                assert not bad

        async def request(tenant: str) -> None:
            before = fleet.current(tenant)
            answer = await fleet.ask(tenant)
            assert answer.startswith(f"{tenant}@") and split_adapter_name(answer)[1] >= split_adapter_name(before)[1]

        async def pin(tenant: str) -> None:
            version = 1000 * next(numbers)  # what is published without a pin goes on from there
            if chance.random() < 0.5:
                fleet.cache.pin(manifest(tenant, version))
            else:
                with suppress(PublishError):
                    published[tenant] = max(published[tenant], version)
                    await fleet.publish(manifest(tenant, version), pinned=True)
            pinned.append(f"{tenant}@{version}")

        async def request_pinned(_: str) -> None:
            if pinned:
                name = chance.choice(pinned)
                with suppress(RefusedError):  # its pinned publish met dead engines alone, and failed
                    assert await fleet.ask(name) == name

        async def lose_all(engine: Engine) -> None:
            if engine not in lost:  # it was restarted, and nobody knows
                lost.append(engine)
                engine.held.clear()

        async def die(engine: Engine) -> None:
            if not any(other.fault for other in engines):
                engine.fault = "dead"
                await asyncio.sleep(0.005)
                engine.held.clear()
                engine.fault = ""

        lost: list[Engine] = []
        healer = asyncio.create_task(Healer(fleet.pool, reload=fleet.cache.refill, probe_interval_s=0.002, probe_timeout_s=30.0).run())
        for tenant in published:
            await publish(tenant)
        tasks = []
        for _ in range(60):
            act = chance.choices([publish, request, pin, request_pinned, lose_all, die], [2, 8, 1, 4, 1, 1])[0]
            tasks.append(asyncio.create_task(act(chance.choice(engines if act in (lose_all, die) else "xyzuv"))))
            await asyncio.sleep(chance.choice([0, 0.001]))
        await asyncio.gather(*tasks)
        await until(lambda: len(fleet.pool.healthy) == 3 and not fleet.cache._chores)
        healer.cancel()
        assert all(not slots.in_use and not slots.coming and not slots.num_loading for slots in fleet.cache.slots.values())

    using(engines, body, capacity=4, heal_timeout_s=60.0)


def test_a_bad_adapter_fails_its_tenant_alone_and_its_old_version_goes_on() -> None:
    engines = [Engine(name) for name in "abc"]

    async def body(fleet: Fleet) -> None:
        await fleet.publish(manifest("alice", 1))
        bad, good = await asyncio.gather(
            fleet.publish(manifest("alice", 2, folder="bad")), fleet.publish(manifest("bob", 1)), return_exceptions=True)
        assert isinstance(bad, PublishError)
        assert "alice@2 is bad: no engine takes it; a: a answered with 400: bad is no adapter; b:" in str(bad)
        assert not isinstance(good, BaseException) and len(good.serving) == 3
        assert await fleet.ask("alice") == "alice@1"
        assert len(fleet.pool.healthy) == 3
        assert len((await fleet.publish(manifest("alice", 2))).serving) == 3  # mended, it may take its name

    using(engines, body)


def test_an_engine_that_hangs_is_lost_to_16_publishes_and_not_one_tenant_fails() -> None:
    engines = [Engine("a"), Engine("b", fault="hung"), Engine("c")]

    async def body(fleet: Fleet) -> None:
        reports = await asyncio.gather(*(fleet.publish(manifest(f"t{i}", 1)) for i in range(16)))
        assert all(sorted(report.serving) == ["a", "c"] for report in reports)
        assert all(report.quarantined["b"] for report in reports)
        assert fleet.pool.states["b"] is State.QUARANTINED
        assert max(report.total_s for report in reports) < 20

    using(engines, body, timeout_s=1.0)
    assert max(engine.most_loading for engine in engines) == 4


def test_a_publish_that_lost_every_engine_goes_on_when_one_heals() -> None:
    engine = Engine("a", fault="dead")

    async def body(fleet: Fleet) -> None:
        publish = asyncio.create_task(fleet.publish(manifest("alice", 1)))
        await fleet.pool.wait_quarantined("a")
        engine.fault = ""
        fleet.pool.mark_healing("a")
        await fleet.cache.refill(engine)
        fleet.pool.restore("a", None)
        assert (await publish).serving == ("a",)

    using([engine], body, heal_timeout_s=60.0)


def test_a_publish_that_no_engine_can_take_says_why() -> None:
    async def body(fleet: Fleet) -> None:
        with pytest.raises(PublishError, match="alice@1 could not be published: no engine can serve: a: a cannot be reached"):
            await fleet.publish(manifest("alice", 1))
        with pytest.raises(RefusedError, match="no adapter 'alice'; publish it first"):
            await fleet.ask("alice")

    using([Engine("a", fault="dead")], body, heal_timeout_s=0.1)


def test_an_engine_that_lost_an_adapter_is_given_it_again_and_a_wrong_request_is_refused_once() -> None:
    engine = Engine("a")

    async def body(fleet: Fleet) -> None:
        await fleet.publish(manifest("alice", 1))
        engine.held.clear()
        assert await fleet.ask("alice") == "alice@1"
        assert (engine.num_unknown, engine.loads) == (1, ["alice@1"] * 2)
        engine.held["alice@1"] = "something else"  # it holds other weights under this name

        async def refuse_once(*_: Any, **__: Any) -> list[Sample]:
            del engine.generate
            raise RefusedError("400: not with this adapter")

        engine.generate = refuse_once
        assert await fleet.ask("alice") == "alice@1"
        assert engine.held == {"alice@1": "alice-1"} and len(engine.loads) == 3

        async def refuse(*_: Any, **__: Any) -> list[Sample]:
            raise RefusedError("400: token 999 is none")

        engine.generate = refuse
        with pytest.raises(RefusedError, match="token 999"):
            await fleet.ask("alice")
        assert len(engine.loads) == 3  # it still holds what it should

    using([engine], body)


def test_a_healed_engine_holds_what_the_others_hold_unless_the_folder_is_spoilt() -> None:
    engines = [Engine(name) for name in "ab"]

    async def body(fleet: Fleet) -> None:
        await asyncio.gather(*(fleet.publish(manifest(f"t{i}", 1)) for i in range(6)))
        a, b = engines
        fleet.pool.quarantine("a", "it died")
        a.held.clear()
        await fleet.publish(manifest("t0", 2))
        await fleet.publish(manifest("t9", 1))
        fleet.pool.mark_healing("a")
        await fleet.cache.refill(a)
        fleet.pool.restore("a", None)
        assert sorted(a.held) == sorted(b.held) == ["t0@2", *(f"t{i}@1" for i in range(1, 6)), "t9@1"]
        fleet.pool.quarantine("a", "it died again")
        a.held.clear()
        published = fleet.cache.catalog._published
        published["t1@1"] = replace(published["t1@1"], folder="bad")  # spoilt on disk, and b still holds it: a is to blame
        with pytest.raises(RefusedError, match="bad is no adapter"):
            await fleet.cache.refill(a)
        fleet.pool.quarantine("b", "it died, too")  # nobody holds it: it is left out
        await fleet.cache.refill(a)
        assert sorted(a.held) == ["t0@2", *(f"t{i}@1" for i in range(2, 6)), "t9@1"]

    using(engines, body)


def test_folders_stay_while_anyone_may_read_them(tmp_path: Path) -> None:
    engine = Engine("a")

    def write(version: int) -> Manifest:
        folder = tmp_path / f"v{version}"
        folder.mkdir()
        return manifest("alice", version, folder=str(folder))

    def left() -> list[str]:
        return sorted(folder.name for folder in tmp_path.iterdir())

    async def body(fleet: Fleet) -> None:
        await fleet.publish(write(1))
        engine.held_up = asyncio.Event()
        call = asyncio.create_task(fleet.ask("alice"))
        await until(lambda: engine.running["alice@1"])
        for version in (2, 3, 4):
            await fleet.publish(write(version))
        assert left() == ["v1", "v3", "v4"]  # a request still uses the first
        engine.held_up.set()
        assert await call == "alice@1"
        fleet.cache.prune()
        assert left() == ["v3", "v4"]
        engine.held_up.clear()
        call = asyncio.create_task(fleet.ask("alice"))
        await until(lambda: engine.running["alice@4"])
        for version in (5, 6, 7):
            await fleet.publish(write(version))
        engine.held_up.set()
        assert await call == "alice@4" and left() == ["v4", "v6", "v7"]

    using([engine], body)
    assert left() == ["v6", "v7"], "as no version follows that would have the others removed"


def test_pinned_versions_are_served_at_their_first_request_beside_what_is_published(tmp_path: Path) -> None:
    engines = [Engine(name) for name in "ab"]
    folders = {version: tmp_path / f"v{version}" for version in range(1, 8)}

    def pinnable(version: int) -> Manifest:
        folders[version].mkdir(exist_ok=True)
        return manifest("alice", version, folder=str(folders[version]))

    async def body(fleet: Fleet) -> None:
        fleet.cache.pin(pinnable(5))  # as after a restart: newer than what is published next
        assert not any(engine.held for engine in engines) and fleet.cache.held == {"a": [], "b": []}
        for version in (1, 2, 3, 4):
            await fleet.publish(pinnable(version))
        assert await fleet.ask("alice@5") == "alice@5"
        assert await fleet.ask("alice") == "alice@4"
        report = await fleet.publish(pinnable(7), pinned=True)
        assert sorted(report.serving) == ["a", "b"]
        await fleet.publish(pinnable(6), pinned=True)
        assert await asyncio.gather(*(fleet.ask(f"alice@{version}") for version in (5, 6, 7))) == ["alice@5", "alice@6", "alice@7"]
        assert fleet.current("alice") == "alice@7"
        assert (await fleet.dispatcher.score((1, 2), adapter="alice@5")).version == 5
        assert {name for names in fleet.cache.held.values() for name in names} == {"alice@5", "alice@6", "alice@7"}
        assert sorted(folder.name for folder in tmp_path.iterdir()) == ["v3", "v4", "v5", "v6", "v7"]
        fleet.cache.remove("alice")
        assert await fleet.ask("alice@5") == "alice@5"
        with pytest.raises(RefusedError, match="no adapter 'alice@4'"):
            await fleet.ask("alice@4")

    using(engines, body)


def test_a_load_that_fails_at_a_request_is_told_as_an_event() -> None:
    heard = Heard()

    async def body(fleet: Fleet) -> None:
        fleet.cache.pin(manifest("alice", 1))
        fleet.cache.pin(manifest("alice", 2, folder="bad"))
        assert await fleet.ask("alice@1") == "alice@1"
        with pytest.raises(RefusedError, match="bad is no adapter"):
            await fleet.ask("alice@2")

    using([Engine("a")], body, listener=heard)
    events = [(each["kind"], each["adapter"], each.get("reason", "")) for each in heard.events]
    refused = ("load_failed", "alice@2", "a answered with 400: bad is no adapter")
    assert events[:2] == [("adapter_loaded", "alice@1", ""), refused] and set(events[1:]) == {refused}


def test_an_unpinned_version_leaves_with_its_last_request_and_its_folder_stays(tmp_path: Path) -> None:
    engine = Engine("a", pace_s=0.02)

    async def body(fleet: Fleet) -> None:
        pinned = manifest("alice", 1, folder=str(tmp_path))
        fleet.cache.pin(pinned)
        for wait_s in (0.01, 0.05):  # while it is loaded; while it generates
            call = asyncio.create_task(fleet.ask("alice@1"))
            await asyncio.sleep(wait_s - 0.02 * (wait_s > 0.02))
            fleet.cache.unpin("alice@1")
            with pytest.raises(RefusedError, match="there is no adapter 'alice@1'; publish it first"):
                await fleet.ask("alice@1")
            with pytest.raises(PublishError, match="requests still use alice@1"):
                fleet.cache.pin(manifest("alice", 1, folder="another"))
            assert await call == "alice@1"
            await until(lambda: not engine.held)
            fleet.cache.pin(pinned)
        fleet.cache.prune()
        assert tmp_path.exists()

    using([engine], body)


def test_a_pinned_publish_that_fails_is_unknown_unless_it_was_pinned_before() -> None:
    async def body(fleet: Fleet) -> None:
        with pytest.raises(PublishError, match="alice@1 is bad"):
            await fleet.publish(manifest("alice", 1, folder="bad"), pinned=True)
        with pytest.raises(RefusedError, match="there is no adapter 'alice@1'"):
            await fleet.ask("alice@1")
        fleet.cache.pin(manifest("alice", 2, folder="bad"))
        with pytest.raises(PublishError, match="alice@2 is bad"):
            await fleet.publish(manifest("alice", 2, folder="bad"), pinned=True)
        with pytest.raises(RefusedError, match="bad is no adapter"):
            await fleet.ask("alice@2")

    using([Engine("a")], body)


def test_thousands_of_pinned_versions_take_turns_on_engines_that_hold_four() -> None:
    engines = [Engine(name, 4, pace_s=0.0002) for name in "ab"]
    chance = random.Random(0)

    async def body(fleet: Fleet) -> None:
        for i in range(3000):
            fleet.cache.pin(manifest(f"t{i % 100}", i))
        names = [f"t{i % 100}@{i}" for i in (chance.randrange(3000) for _ in range(200))]
        slots = asyncio.Semaphore(8)

        async def one(name: str) -> None:
            async with slots:
                assert await fleet.ask(name) == name

        await asyncio.gather(*map(one, names))
        assert all(0 < len(names) <= 4 for names in fleet.cache.held.values())

    using(engines, body, capacity=4)
    assert not any(engine.num_unknown for engine in engines)


def test_the_base_model_is_served_beside_adapters_once_engines_have_proven_it_also_after_healing() -> None:
    engines = [Engine("a"), Engine("b", base_logprob=-2.5)]

    async def body(fleet: Fleet) -> None:
        await fleet.publish(manifest("alice", 1))
        with pytest.raises(EngineError, match="no engine can serve: a: has no proven version yet"):
            await fleet.ask("")
        await fleet.cache.serve_base((1, 2), (-2.0,))
        assert fleet.pool.states == {"a": State.SERVING, "b": State.QUARANTINED}
        assert await fleet.ask("") == "" and await fleet.ask("alice") == "alice@1"
        assert (await fleet.dispatcher.score((1, 2, 3), adapter="")).version == 0
        fleet.pool.mark_healing("b")
        with pytest.raises(ProofError, match="b serves another base model: its canary log-probabilities are off by 0.5, more than 0.001"):
            await fleet.cache.refill(engines[1])
        engines[1].base_logprob = -2.0
        version = await fleet.cache.refill(engines[1])
        fleet.pool.restore("b", version)
        assert fleet.pool.states["b"] is State.SERVING and version == 0
        fleet.pool.quarantine("a", "it died")
        assert await fleet.ask("") == ""

    using(engines, body)


# -- real engines ----------------------------------------------------------------------------------------------------------------------


def write(folder: Path, tenant: str, version: int, model_dir: str, *, rank: int = 4) -> Manifest:
    """A random adapter of all attention outputs as a folder; what its canary is like, an engine that holds it says."""
    config = json.loads((Path(model_dir) / "config.json").read_text())
    width = config["num_attention_heads"] * (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    generator = torch.Generator().manual_seed(hash((tenant, version)) % 2**31)
    adapter = Adapter(rank, 1.0, {"model.layers.0.self_attn.o_proj": (
        torch.randn(rank, width, generator=generator), torch.randn(config["hidden_size"], rank, generator=generator))})
    path = folder / f"{tenant}-{version}"
    write_adapter(adapter, path, base_model=model_dir, dropout=0.0)
    return Manifest(
        version, str(path), adapter.fingerprint(), (13, 14, 15, 5, 6), (0.0,) * 4, adapter=tenant, num_bytes=adapter.num_bytes)


async def score(manifest: Manifest, url: str) -> Manifest:
    """The manifest with the log-probability of its canary, from an engine that takes no part otherwise."""
    async with EngineSession() as http:
        client = EngineClient("reference", url, http.session)
        await client.load_adapter(manifest.name, manifest.folder, timeout_s=60)
        return replace(manifest, canary_logprobs=(await client.prove(manifest.canary, timeout_s=60, adapter=manifest.name)).canary_logprobs)


def test_real_engines_serve_adapters_and_get_them_back_after_a_restart(start_engine, model_dir, tmp_path) -> None:
    (first, url_0), (_, url_1), (_, reference) = start_engine(), start_engine(), start_engine()
    heard = Heard()

    async def restart(name: str) -> str:
        assert name == "engine 0"
        return start_engine()[1]

    async def main() -> None:
        async with EngineSession() as http:
            clients = [EngineClient(f"engine {i}", url, http.session) for i, url in enumerate([url_0, url_1])]
            async with open_fleet(clients, capacity=8, timeout_s=60, heal_timeout_s=60) as fleet:
                async def reload(client: EngineClient) -> None:
                    await fleet.cache.refill(client)

                healer = asyncio.create_task(Healer(
                    fleet.pool, reload=reload, restart=restart, probe_interval_s=0.1, probe_timeout_s=20, listener=heard).run())
                good = [await score(write(tmp_path, tenant, 1, model_dir), reference) for tenant in ("alice", "bob")]
                reports = await asyncio.gather(*map(fleet.publish, good))
                assert all(sorted(report.serving) == ["engine 0", "engine 1"] for report in reports)

                corrupt = write(tmp_path, "alice", 2, model_dir)
                (Path(corrupt.folder) / "adapter_model.safetensors").write_bytes(b"not an adapter")
                lying = replace(await score(write(tmp_path, "bob", 2, model_dir), reference), canary_logprobs=(-9.0,) * 4)
                missing = write(tmp_path, "carol", 1, model_dir)
                shutil.rmtree(missing.folder)
                large = write(tmp_path, "dave", 1, model_dir, rank=65)
                outcomes = await asyncio.gather(*map(fleet.publish, [corrupt, lying, missing, large]), return_exceptions=True)
                assert all(isinstance(outcome, PublishError) and "is bad: no engine takes it" in str(outcome) for outcome in outcomes)
                assert len(fleet.pool.healthy) == 2

                await asyncio.to_thread(first.stop)
                samples = [sample for tenant in ("alice", "bob") for sample in await fleet.dispatcher.generate(
                    PROMPT, SAMPLING, n=4, adapter=tenant)]
                assert {version for sample in samples for version in sample.versions} == {1}
                await until(lambda: len(fleet.pool.healthy) == 2)
                assert all(sorted(fleet.cache.holders(m.name)) == ["engine 0", "engine 1"] for m in good)
                await clients[0].unload_adapter("alice@1", timeout_s=60)  # behind our back
                await asyncio.gather(*(fleet.ask("alice") for _ in range(6)))
                healer.cancel()
                with suppress(asyncio.CancelledError):
                    await healer

    asyncio.run(main())
    assert heard.events[-1]["kind"] == "healed"
