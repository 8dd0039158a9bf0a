"""Counts of prompts and samples, by hand."""

from types import SimpleNamespace

from offbeat.rollout.outcomes import KINDS, Outcomes


def samples(*unusable: str | None) -> list:
    return [SimpleNamespace(unusable=kind, reason=f"{kind}: why") for kind in unusable]


def test_shares_are_of_the_prompts_settled_since_the_last_look() -> None:
    outcomes = Outcomes()
    for kind in (None, None, "timed out", "too long"):
        outcomes.settled(kind)
    outcomes.drawn_again()
    stats = outcomes.take().values()
    assert (stats["rollout/rejected_share"], stats["rollout/rejected_timed_out_share"]) == (0.5, 0.25)
    assert stats["rollout/drawn_again_prompts"] == 1
    assert stats["rollout/rejected_engine_failed_share"] == 0
    assert len(stats) == len(KINDS) + 2
    outcomes.settled(None)
    assert outcomes.take().values()["rollout/rejected_share"] == 0
    assert outcomes.take().values() == {"rollout/drawn_again_prompts": 0}


def test_each_kind_that_takes_more_than_a_twentieth_of_the_prompts_is_told_once() -> None:
    told: list[str] = []
    outcomes = Outcomes(told.append)
    for _ in range(18):
        outcomes.settled(None)
    outcomes.settled("timed out", "first")  # 1 of 19: too few to say
    outcomes.settled("timed out", "second")
    outcomes.settled("timed out", "third")
    assert told == ["2 of 20 prompts were rejected: timed out (10%); what is learnt is biased against them. The last: second"]
    outcomes.settled("engine failed", "fourth")  # 1 of 22 is below 5 %
    outcomes.settled("engine failed", "fifth")
    assert len(told) == 2 and "2 of 23 prompts were rejected: engine failed (9%)" in told[1]


def test_a_filter_is_not_warned_of() -> None:
    told: list[str] = []
    outcomes = Outcomes(told.append)
    for _ in range(50):
        outcomes.settled("not accepted")
    assert told == []
    assert outcomes.take().values()["rollout/rejected_not_accepted_share"] == 1


def test_samples_that_are_lost_inside_groups_are_told_of_once() -> None:
    told: list[str] = []
    outcomes = Outcomes(told.append)
    outcomes.played(samples(*[None] * 19, "too long", "reward failed", "reward failed", "reward failed"))
    assert told == [
        "2 of 22 samples cannot be trained on: reward failed (9%); what is learnt is biased against them. The last: reward failed: why"]
