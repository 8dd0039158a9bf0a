"""The account of a publication: what the report says, and who is to blame under random outcomes."""

import random

from hypothesis import given
from hypothesis import strategies as st

from offbeat.fleet.publication import AdapterPublication, Taken, WeightsPublication
from offbeat.weights.proof import Outcome, Verdict


def test_the_report_has_the_slowest_engine_and_the_largest_gap() -> None:
    publication = WeightsPublication(5)
    publication.served("a", Taken(1.0, 0.5, Verdict(Outcome.PROVEN, 1e-4)))
    publication.served("b", Taken(0.2, 0.7, Verdict(Outcome.UNSURE, 2e-4, "within noise")))
    publication.served("c", None)
    publication.failed("d", "staging failed")
    assert (publication.stage_s, publication.switch_s, publication.largest_gap) == (1.0, 0.7, 2e-4)
    assert publication.serving == ["a", "b", "c"] and publication.unsure == {"b": "within noise"} and publication.reasons == {
        "d": "staging failed"}


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
