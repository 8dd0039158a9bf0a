"""Whose fault a failure is, under random outcomes, and fan-out to engines that misbehave."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.data import wire
from offbeat.errors import BusyError, EngineError, PublishError, RefusedError
from offbeat.weights.adapters import AdapterManifest
from offbeat.weights.lora_fanout import Fanout, FanoutReport, fan_out, install
from offbeat.weights.proof import Judge
from offbeat.weights.protocol import Proof

MANIFEST = AdapterManifest("alice", 3, "folder", "right", canary=(1, 2, 3), canary_logprobs=(-1.0, -1.0), num_bytes=100)


@given(seed=st.integers(0, 2**32), num_engines=st.integers(1, 6))
def test_an_engine_is_blamed_for_its_own_fault_or_where_another_shows_that_the_adapter_is_good(seed: int, num_engines: int) -> None:
    chance, fanout = random.Random(seed), Fanout()
    outcomes = {f"engine {i}": chance.choice(["served", "failed", "doubted"]) for i in range(num_engines)}
    blamed: list[str] = []
    for engine, outcome in outcomes.items():
        blamed += fanout.served(engine) if outcome == "served" else getattr(fanout, outcome)(engine, "why")
    good = "served" in outcomes.values()
    assert sorted(blamed) == [engine for engine, outcome in outcomes.items() if outcome == "failed" or (outcome == "doubted" and good)]
    assert bool(fanout.doubts) == (not good and "doubted" in outcomes.values())


@dataclass
class Engine:
    """An engine in memory, with a fault."""

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
        assert canary == MANIFEST.canary and adapter in self.folders
        if self.fault == "forget":
            raise RefusedError(f"{self.name} answered with 404: no adapter {adapter}")
        return Proof(3, "wrong" if self.fault == "lazy" else "right", (-1.0005,) * 2 if self.fault == "slow" else (-1.0,) * 2)


def publish(*engines: Engine, timeout_s: float = 60.0, patience_s: float = 60.0) -> tuple[FanoutReport, list[str], dict[str, str]]:
    serving: list[str] = []
    failed: dict[str, str] = {}

    def on_serving(engine: str, name: str) -> None:
        assert name == "alice@3"
        serving.append(engine)

    report = asyncio.run(fan_out(
        "alice@3", engines, partial(install, manifest=MANIFEST, judge=Judge(tolerance=1e-3), timeout_s=timeout_s, patience_s=patience_s),
        timeout_s=timeout_s, num_bytes=100, on_serving=on_serving, on_failed=failed.__setitem__))
    return report, serving, failed


def test_every_engine_is_served_at_its_own_pace_and_told_at_once() -> None:
    engines = Engine("a", "slow"), Engine("b"), Engine("c", num_busy=2)
    report, serving, failed = publish(*engines)
    assert serving == ["b", "a", "c"] or serving == ["b", "c", "a"]
    assert not failed and not report.adapter_is_bad
    assert all(engine.folders == {"alice@3": "folder"} for engine in engines)
    assert {name: (d.num_retries, d.num_bytes, d.reason) for name, d in report.deliveries.items()} == {
        "a": (0, 100, ""), "b": (0, 100, ""), "c": (2, 100, "")}
    assert report.deliveries["b"].seconds < report.deliveries["a"].seconds <= report.total_s and report.total_s >= 0.2
    assert report.canary_gap == report.deliveries["a"].canary_gap == pytest.approx(0.0005)
    assert wire.decode(FanoutReport, wire.encode(report)) == report


@pytest.mark.parametrize(("fault", "reason"), [
    ("refuse", "rank 99 is too large"), ("hang", "alice@3 on bad passed its deadline of 1.2 s"), ("die", "cannot be reached"),
    ("lazy", "failed its proof of alice@3: its weights have fingerprint wrong instead of right"),
    ("forget", "failed its proof of alice@3: bad answered with 404"),
])
def test_one_engine_that_fails_is_blamed_and_the_tenant_goes_on_with_the_others(fault: str, reason: str) -> None:
    bad = Engine("bad", fault)
    report, serving, failed = publish(bad, Engine("slow", "slow"), Engine("good"), timeout_s=1.2)
    assert serving == ["good", "slow"]
    assert list(failed) == ["bad"] and reason in failed["bad"]
    assert report.check() is report and report.serving == ["good", "slow"]
    assert not bad.folders


@pytest.mark.parametrize("fault", ["refuse", "lazy"])
def test_an_adapter_that_no_engine_takes_is_bad_and_no_engine_is_blamed(fault: str) -> None:
    report, serving, failed = publish(Engine("a", fault), Engine("b", fault))
    assert report.adapter_is_bad and not serving and not failed
    with pytest.raises(PublishError, match="the adapter alice@3 is bad: no engine takes it; a: .*; b: "):
        report.check()


def test_a_dead_engine_is_blamed_beside_an_adapter_that_is_bad() -> None:
    report, _, failed = publish(Engine("a", "refuse"), Engine("b", "die"))
    assert report.adapter_is_bad and list(failed) == ["b"]


def test_no_engine_left_fails_the_publish_with_each_reason() -> None:
    report, _, failed = publish(Engine("a", "hang"), Engine("b", "die"), timeout_s=0.1)
    assert sorted(failed) == ["a", "b"] and not report.adapter_is_bad
    with pytest.raises(PublishError, match="alice@3 is served by no engine: none is left; b: b cannot be reached; a: .*deadline of 0.1 s"):
        report.check()
    with pytest.raises(PublishError, match="no engine is healthy"):
        publish()[0].check()


def test_an_engine_that_stays_full_is_not_to_blame() -> None:
    start = time.monotonic()
    report, _, failed = publish(Engine("full", num_busy=10**9), patience_s=0.3)
    assert time.monotonic() - start >= 0.3
    assert not failed and not report.adapter_is_bad
    with pytest.raises(PublishError, match="full answered with 429"):
        report.check()


def test_room_is_made_before_each_attempt() -> None:
    engine, calls = Engine("a", num_busy=1), []

    async def make_room() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise BusyError("all in use")

    assert asyncio.run(install(
        engine, MANIFEST, judge=Judge(tolerance=1e-3), timeout_s=60, patience_s=60, make_room=make_room)).num_retries == 2
    assert len(calls) == 3
