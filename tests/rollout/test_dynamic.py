"""Which groups dynamic sampling rejects, by hand, and its bound."""

import numpy as np

from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.trajectory import Group, Trajectory, TurnEnd
from offbeat.rollout.dynamic import DynamicSampling


def group(*rewards: object) -> Group:
    empty = np.zeros(0)
    return Group("0:0", 0, tuple(Trajectory(empty, empty, empty, empty, reward) for reward in rewards))  # pyright: ignore[reportArgumentType]


def played(*rewards: float) -> Trajectory:
    """An episode of one token a turn, which earns these."""
    turns = tuple(TurnEnd(2 + number, reward, f"s{number}") for number, reward in enumerate(rewards))
    size = len(rewards) + 1
    return Trajectory(np.ones(size), np.arange(size) > 0, np.zeros(size), np.arange(size) * 0 - (np.arange(size) == 0), 0.0, turns=turns)


def test_separate_rewards_may_differ_where_their_sums_are_equal() -> None:
    group_of_parts = group({"right": 1.0, "form": 0.0}, {"right": 0.0, "form": 1.0})
    for preset, rejected in (("dapo", True), ("gdpo", False)):
        assert bool(DynamicSampling(AlgorithmConfig(preset=preset), batch_size=4).rejects(group_of_parts)) == rejected


def test_turns_may_differ_where_totals_are_equal_if_credit_compares_turns() -> None:
    early, late = played(1.0, 0.0), played(0.0, 1.0)
    for credit, rejected in (("episode", True), ("return", False), ("turn", False), ("state", False)):
        sampling = DynamicSampling(AlgorithmConfig(turn_credit=credit), batch_size=4)
        assert bool(sampling.rejects(Group("0:0", 0, (early, late)))) == rejected, credit
        assert sampling.rejects(Group("0:0", 0, (late, late))) == (
            "all rewards are equal: 1" if credit == "episode" else "no turn led to more than another"), credit
        assert sampling.rejects(Group("0:0", 0)) == "there are no rewards"


def test_a_judges_scores_are_equal_to_a_tolerance() -> None:
    for tolerance, rejected in ((0.0, False), (0.1, True)):
        sampling = DynamicSampling(AlgorithmConfig(equal_rewards_tolerance=tolerance), batch_size=4)
        assert bool(sampling.rejects(group(0.5, 0.53125))) == rejected


def test_what_a_step_rejects_is_bounded_and_counted() -> None:
    told: list[str] = []
    sampling = DynamicSampling(AlgorithmConfig(max_draw_batches=2.5), batch_size=2, warn=told.append)
    flat, varied = group(0.0, 0.0), group(0.0, 1.0)
    assert [bool(sampling.rejects(each)) for each in (flat, varied, flat, flat, flat, varied)] == [True, False, True, True, False, False]
    assert sampling.num_rejected == 3 and len(told) == 1
    assert sampling.take_stats().values() == {
        "sampling/drawn_groups": 6, "sampling/rejected_groups": 3, "sampling/kept_flat_groups": 1, "sampling/rejected_share": 0.5}
    sampling.start_batch()
    assert sampling.rejects(flat) == "all rewards are equal: 0"
    assert sampling.take_stats().values()["sampling/rejected_share"] == 1
    assert "sampling/rejected_share" not in sampling.take_stats().values()


def test_a_single_batch_of_draws_rejects_nothing() -> None:
    assert not DynamicSampling(AlgorithmConfig(max_draw_batches=1), batch_size=8).rejects(group(1.0, 1.0))
