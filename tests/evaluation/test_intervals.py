"""Intervals: against formulas solved by hand, and how often they hold the truth."""

import numpy as np
import pytest

from offbeat.evaluation.intervals import has_fallen, mean_interval, share_interval


@pytest.mark.parametrize(("right", "low", "high"), [(0, 0.0, 0.278), (5, 0.237, 0.763), (10, 0.722, 1.0)])
def test_of_one_answer_to_each_prompt_the_interval_is_wilsons(right: int, low: float, high: float) -> None:
    # Of 10 prompts, from the formula solved by hand as a quadratic in the share.
    values = np.array([1.0] * right + [0.0] * (10 - right))
    assert share_interval(values, num_samples=1) == pytest.approx((low, high), abs=5e-4)


def test_more_answers_narrow_it_only_as_far_as_they_say_more() -> None:
    half = np.array([0.0] * 20 + [1.0] * 20)
    assert share_interval(half, num_samples=16) == share_interval(half, num_samples=1), "all answers to a prompt are alike"
    even = np.full(40, 0.5)
    answers = np.array([0.0, 1.0] * (40 * 8))
    assert share_interval(even, num_samples=16) == share_interval(answers, num_samples=1), "as if each answer had a prompt of its own"
    between = share_interval(np.linspace(0.2, 0.8, 40), num_samples=16)
    assert share_interval(half, num_samples=1)[0] < between[0] < share_interval(even, num_samples=16)[0]


@pytest.mark.parametrize(("num_samples", "spread"), [(1, 2.0), (8, 2.0), (8, 30.0), (8, 0.3)])
def test_it_holds_the_truth_as_often_as_it_says(num_samples: int, spread: float) -> None:
    random = np.random.default_rng(7)
    held = []
    for _ in range(1000):
        chances = random.beta(spread * 0.3, spread * 0.7, size=60)
        low, high = share_interval(random.binomial(num_samples, chances) / num_samples, num_samples=num_samples)
        held.append(low <= 0.3 <= high)
    assert 0.93 <= np.mean(held) <= 0.98


def test_the_bootstrap_agrees_with_the_normal_interval_of_many_values_and_is_always_the_same() -> None:
    values = np.random.default_rng(3).normal(2.0, 5.0, size=400)
    half = 1.96 * values.std(ddof=1) / 20
    assert mean_interval(values) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1)
    assert mean_interval(values) == mean_interval(values.copy())
    assert mean_interval(np.full(5, 0.25)) == (0.25, 0.25)


def test_a_bootstrap_of_very_many_prompts_is_drawn_in_parts() -> None:
    low, high = mean_interval(np.arange(30_000) % 2)
    assert 0.49 < low < 0.5 < high < 0.51


def test_a_share_has_fallen_where_newcombes_interval_of_the_difference_leaves_out_zero() -> None:
    # Wilson's intervals of 8 and 2 of 10 are 0.490 to 0.943 and 0.057 to 0.510, so the difference of 0.6 is at least 0.6 - 0.438.
    assert has_fallen(0.8, 0.2, num_prompts=10)
    # Those of 6 and 4 of 10 are 0.313 to 0.832 and 0.168 to 0.687: at least 0.2 - 0.406.
    assert not has_fallen(0.6, 0.4, num_prompts=10) and not has_fallen(0.2, 0.8, num_prompts=10)
    fewest = next(count for count in range(5, 500) if has_fallen(0.6, 0.4, num_prompts=count))
    assert 45 <= fewest <= 52, "the normal approximation says 1.96^2 * 2 * 0.24 / 0.04 = 46"
