"""The states of publications under random outcomes: who serves, and who is to blame."""

import random

from hypothesis import given
from hypothesis import strategies as st

from offbeat.fleet.publication import AdapterPublication, Stage, WeightsPublication
from offbeat.weights.proof import Judge
from offbeat.weights.protocol import Manifest, Proof

MANIFEST = Manifest(version=5, folder="v5", fingerprint="new", canary=(1, 2, 3), canary_logprobs=(-1.0, -1.0))
GOOD = Proof(5, "new", (-1.0, -1.0))
BAD = [
    Proof(4, "old", (-2.0, -2.0)), Proof(5, "old", (-1.0, -1.0)), Proof(5, "new", (-1.5, -0.5)), Proof(5, "new", (-1.0, float("nan")))]


@given(seed=st.integers(0, 2**32), num_engines=st.integers(1, 6))
def test_an_engine_serves_only_with_a_right_proof_and_switches_only_after_all_have_staged(seed: int, num_engines: int) -> None:
    chance = random.Random(seed)
    publication, actions = WeightsPublication.start(MANIFEST, [f"engine {i}" for i in range(num_engines)], judge=Judge(tolerance=1e-3))
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


@given(seed=st.integers(0, 2**32), num_engines=st.integers(1, 6))
def test_an_engine_is_blamed_for_its_own_fault_or_where_another_shows_that_the_adapter_is_good(seed: int, num_engines: int) -> None:
    chance, publication = random.Random(seed), AdapterPublication()
    outcomes = {f"engine {i}": chance.choice(["served", "full", "failed", "doubted"]) for i in range(num_engines)}
    blamed: list[str] = []
    for engine, outcome in outcomes.items():
        blamed += publication.served(engine) if outcome == "served" else getattr(publication, outcome)(engine, "why")
    good = "served" in outcomes.values()
    assert sorted(blamed) == [engine for engine, outcome in outcomes.items() if outcome == "failed" or (outcome == "doubted" and good)]
    assert publication.adapter_is_bad == (not good and "doubted" in outcomes.values())
    assert publication.reasons.keys() | set(publication.serving) == outcomes.keys()
    assert all(outcomes[engine] == "served" for engine in publication.serving)
