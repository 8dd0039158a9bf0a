"""The publication's states under random outcomes, and the publisher against engines that misbehave."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.config.weights import WeightsConfig
from offbeat.errors import EngineError, ProofError, PublishError
from offbeat.weights.proof import Judge
from offbeat.weights.protocol import Manifest, Proof
from offbeat.weights.publish import Publication, Publisher, Stage

MANIFEST = Manifest(version=5, folder="v5", fingerprint="new", canary=(1, 2, 3), canary_logprobs=(-1.0, -1.0))
GOOD = Proof(5, "new", (-1.0, -1.0))
Recover = Callable[[int], Awaitable[list[str]]]
BAD = [
    Proof(4, "old", (-2.0, -2.0)), Proof(5, "old", (-1.0, -1.0)), Proof(5, "new", (-1.5, -0.5)), Proof(5, "new", (-1.0, float("nan")))]


@given(seed=st.integers(0, 2**32), num_engines=st.integers(1, 6))
def test_an_engine_serves_only_with_a_right_proof_and_switches_only_after_all_have_staged(seed: int, num_engines: int) -> None:
    chance = random.Random(seed)
    publication, actions = Publication.start(MANIFEST, [f"engine {i}" for i in range(num_engines)], judge=Judge(tolerance=1e-3))
    proofs: dict[str, Proof] = {}
    while actions:
        action = actions.pop(chance.randrange(len(actions)))
        if action.stage is not Stage.STAGING:
            assert Stage.STAGING not in publication.stages.values()
        if chance.random() < 0.2:
            actions += publication.failed(action.engine, "unlucky")
        elif action.stage is Stage.PROVING:
            proofs[action.engine] = chance.choice([GOOD, *BAD])
            actions += publication.proved(action.engine, proofs[action.engine])
        else:
            actions += publication.done(action.engine)
    for engine, stage in publication.stages.items():
        assert stage in (Stage.SERVING, Stage.QUARANTINED)
        assert (stage is Stage.SERVING) == (proofs.get(engine) == GOOD and engine not in publication.reasons)


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

    async def prove(self, canary: tuple[int, ...], *, timeout_s: float) -> Proof:
        version = 5 if self.fault == "lazy" else self.served.version
        return Proof(version, self.served.fingerprint, self.served.canary_logprobs)


class Channel:
    """Writes nothing; gives the one manifest."""

    async def write(self, version: int) -> Manifest:
        assert version == MANIFEST.version
        return MANIFEST

    async def rewrite(self, manifest: Manifest) -> Manifest | None:
        return None

    def prune(self) -> None:
        pass


def publisher(*engines: Engine, min_engines: int = 1, recover: Recover | None = None) -> tuple[Publisher, dict[str, int], dict[str, str]]:
    serving: dict[str, int] = {}
    quarantined: dict[str, str] = {}
    return (
        Publisher(lambda: {e.name: e for e in engines}, Channel(), WeightsConfig(stage_timeout_s=0.2),
                  judge=Judge(tolerance=1e-3), min_engines=min_engines,
                  on_serving=serving.__setitem__, on_quarantine=quarantined.__setitem__, recover=recover),
        serving, quarantined,
    )


@pytest.mark.parametrize(("fault", "reason"), [
    ("refuse", "no such folder"), ("hang", "did not answer"), ("lazy", "fingerprint old instead of new"),
])
def test_a_bad_engine_is_quarantined_and_the_others_serve(fault: str, reason: str) -> None:
    publish, serving, quarantined = publisher(Engine("a"), Engine("b", fault), Engine("c"))
    report = asyncio.run(publish.publish(5))
    assert serving == {"a": 5, "c": 5}
    assert reason in quarantined["b"]
    assert dict(report.quarantined) == quarantined


def test_too_few_engines_fail_the_publish_with_each_reason() -> None:
    publish, serving, _ = publisher(Engine("a", "lazy"), Engine("b", "refuse"), min_engines=1)
    with pytest.raises(PublishError, match=r"served by 0 engines.*b: staging failed: b: no such folder; a: its weights"):
        asyncio.run(publish.publish(5))
    assert serving == {}


def test_an_engine_is_brought_to_what_is_current_and_proven() -> None:
    publish, serving, _ = publisher(Engine("a"))
    out, lazy = Engine("out"), Engine("out", "lazy")

    async def main() -> None:
        assert await publish.bring(out) is None  # nothing was published
        await publish.publish(5)
        assert await publish.bring(out) == 5
        assert out.served == MANIFEST
        with pytest.raises(ProofError, match="out failed its proof: its weights have fingerprint old instead of new"):
            await publish.bring(lazy)
        with pytest.raises(EngineError, match="no such folder"):
            await publish.bring(Engine("out", "refuse"))

    asyncio.run(main())
    assert serving == {"a": 5}  # who brings it admits it


@pytest.mark.parametrize("gone", [False, True])
def test_an_engine_that_heals_during_a_publish_ends_at_the_new_version(gone: bool) -> None:
    """`gone`: the old version's folder is removed as soon as the new one is being written."""
    older, newer = replace(MANIFEST, version=4), MANIFEST

    class Versions(Channel):
        async def write(self, version: int) -> Manifest:
            await asyncio.sleep(0.05)
            return {4: older, 5: newer}[version]

    class Slow(Engine):
        async def stage(self, manifest: Manifest, *, timeout_s: float) -> None:
            await asyncio.sleep(0.02)
            if gone and manifest is older and writing:
                raise EngineError("the folder is gone")
            await super().stage(manifest, timeout_s=timeout_s)

        async def prove(self, canary: tuple[int, ...], *, timeout_s: float) -> Proof:
            await asyncio.sleep(0.02)
            return await super().prove(canary, timeout_s=timeout_s)

    serving: dict[str, int] = {}
    engine, writing = Slow("healing"), False
    publish = Publisher(
        lambda: {"a": Engine("a")}, Versions(), WeightsConfig(), judge=Judge(tolerance=1e-3), min_engines=1,
        on_serving=serving.__setitem__,
        on_quarantine=lambda name, reason: None)

    async def main() -> None:
        nonlocal writing
        await publish.publish(4)
        writing = True
        publishing = asyncio.create_task(publish.publish(5))
        await asyncio.sleep(0.02 if gone else 0.03)
        assert await publish.bring(engine) == 5
        await publishing

    asyncio.run(main())
    assert engine.served is not None and engine.served.version == newer.version and serving == {"a": 5}


def test_a_publish_below_min_engines_waits_for_engines_to_heal() -> None:
    async def heal(version: int) -> list[str]:
        assert version == 5
        return ["b"]

    async def fail(version: int) -> list[str]:
        raise EngineError("no engine can serve: b: its process died")

    bad = Engine("a", "lazy")
    healing, _, _ = publisher(bad, recover=heal)
    report = asyncio.run(healing.publish(5))
    assert report.serving == ("b",) and list(report.quarantined) == ["a"]
    hopeless, _, _ = publisher(bad, recover=fail)
    with pytest.raises(PublishError, match="served by 0 engines, .* a: its weights have fingerprint old .*; no engine can serve: b: its"):
        asyncio.run(hopeless.publish(5))


def test_an_engine_whose_proof_shows_nothing_serves_and_the_report_says_why() -> None:
    class Silent(Engine):
        async def prove(self, canary: tuple[int, ...], *, timeout_s: float) -> Proof:
            return replace(await super().prove(canary, timeout_s=timeout_s), fingerprint=None)

    publish, serving, quarantined = publisher(Silent("a"), Engine("b"))
    report = asyncio.run(publish.publish(5))
    assert serving == {"a": 5, "b": 5} and not quarantined
    assert list(report.inconclusive) == ["a"] and "its first proof shows its noise" in report.inconclusive["a"]
