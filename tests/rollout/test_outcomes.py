"""Counts of prompts and samples, by hand."""

from types import SimpleNamespace

from offbeat.data.trajectory import UNUSABLE
from offbeat.errors import (
    CodeError,
    DataError,
    DeadlineError,
    EngineError,
    RefusedError,
    RewardError,
    TooLongError,
    WorkerError,
)
from offbeat.rollout.outcomes import KINDS, Outcomes, RolloutListener, failure_of, failure_to_ask


def samples(*unusable: str | None) -> list:
    return [SimpleNamespace(unusable=kind, reason=f"{kind}: why") for kind in unusable]


class Warned(RolloutListener):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


def test_shares_are_of_the_prompts_settled_since_the_last_look() -> None:
    outcomes = Outcomes()
    for kind in (None, None, "timed out", "too long"):
        outcomes.settled("0:0", kind)
    outcomes.drawn_again()
    outcomes.requeued()
    stats = outcomes.take_stats().values()
    assert (stats["rollout/rejected_share"], stats["rollout/rejected_timed_out_share"]) == (0.5, 0.25)
    assert stats["rollout/drawn_again_prompts"] == stats["rollout/requeued_prompts"] == 1
    assert stats["rollout/rejected_engine_failed_share"] == 0
    assert len(stats) == len(KINDS) + 3  # of samples there is no share, as none were played
    outcomes.settled("0:0", None)
    assert outcomes.take_stats().values()["rollout/rejected_share"] == 0
    assert outcomes.take_stats().values() == {"rollout/drawn_again_prompts": 0, "rollout/requeued_prompts": 0}


def test_each_kind_that_takes_more_than_a_twentieth_of_the_prompts_is_told_once() -> None:
    told = Warned()
    outcomes = Outcomes(told)
    for _ in range(18):
        outcomes.settled("0:0", None)
    outcomes.settled("0:1", "timed out", "first")  # 1 of 19: too few to say
    outcomes.settled("0:2", "timed out", "second")
    outcomes.settled("0:3", "timed out", "third")
    assert told.texts == ["2 of 20 prompts were rejected: timed out (10%); training is biased against them. The first, 0:1: first"]
    outcomes.settled("0:4", "engine failed", "fourth")  # 1 of 22 is below 5 %
    outcomes.settled("0:5", "engine failed", "fifth")
    assert len(told.texts) == 2 and "2 of 23 prompts were rejected: engine failed (9%)" in told.texts[1]


def test_a_filter_is_not_warned_of() -> None:
    told = Warned()
    outcomes = Outcomes(told)
    for _ in range(50):
        outcomes.settled("0:0", "not accepted")
    assert told.texts == []
    assert outcomes.take_stats().values()["rollout/rejected_not_accepted_share"] == 1


def test_samples_that_are_lost_inside_groups_are_told_of_once() -> None:
    told = Warned()
    outcomes = Outcomes(told)
    outcomes.played("0:7", samples(*[None] * 19, "too long", "reward failed", "reward failed", "reward failed"))
    assert told.texts == [
        "2 of 22 samples cannot be trained on: reward failed (9%); training is biased against them."
        " The first, of prompt 0:7: reward failed: why"]


def test_shares_of_samples_are_by_reason() -> None:
    outcomes = Outcomes()
    outcomes.played("0:1", samples(None, None, "wrong logprobs", "reward failed"))
    stats = outcomes.take_stats().values()
    assert stats["rollout/unusable_share"] == 0.5
    assert {kind: stats[f"rollout/unusable_{kind.replace(' ', '_')}_share"] for kind in UNUSABLE if kind != "episode failed"} == {
        "reward failed": 0.25, "too long": 0, "malformed": 0, "wrong tokens": 0, "wrong logprobs": 0.25, "wrong versions": 0}


def test_what_fails_is_named_and_drawn_again_unless_the_prompt_cannot_be_asked() -> None:
    kinds = {
        CodeError: "code failed", KeyError: "code failed", DataError: "code failed", RewardError: "reward failed",
        WorkerError: "reward failed",
        TooLongError: "too long", DeadlineError: "timed out", EngineError: "engine failed", RefusedError: "engine failed"}
    failures = [failure_of(error("why")) for error in kinds]
    assert [failure.kind for failure in failures] == list(kinds.values())
    assert all(failure.again for failure in failures)
    assert [type(failure.error) for failure in failures if failure.is_ours] == [WorkerError, DeadlineError, EngineError]
    asked = [failure_to_ask(error("why")) for error in (DataError, TooLongError, KeyError)]
    assert [(failure.kind, failure.again) for failure in asked] == [
        ("prompt refused", False), ("too long", False), ("prompt refused", False)]


def test_the_share_of_failed_episodes_is_there_once_there_was_one() -> None:
    outcomes, name = Outcomes(), "rollout/unusable_episode_failed_share"
    outcomes.played("0:1", samples(None, "malformed"))
    assert name not in outcomes.take_stats().values()
    outcomes.played("0:2", samples(None, "episode failed"))
    assert outcomes.take_stats().values()[name] == 0.5
    outcomes.played("0:3", samples(None, None))
    assert outcomes.take_stats().values()[name] == 0.0
