"""Paired comparisons: p-values and intervals against enumeration, other tests solved by hand, and simulation."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from evaluation.played import played
from offbeat.errors import DataError
from offbeat.evaluation.comparison import compare, compare_sets, difference_interval, sign_flip_test
from offbeat.evaluation.intervals import mean_interval


def test_with_changes_of_one_size_the_test_is_mcnemars_exact_one() -> None:
    changes = np.array([1.0] * 9 + [-1.0] * 2 + [0.0] * 100)
    # Two-sided binomial: 2 * (1 + 11 + 55) / 2^11.
    assert sign_flip_test(changes) == pytest.approx(2 * 67 / 2048)
    assert sign_flip_test(changes * 0.125) == sign_flip_test(changes) == sign_flip_test(-changes)
    assert sign_flip_test(np.zeros(7)) == 1.0
    assert sign_flip_test(np.array([1.0, -1.0])) == 1.0
    assert sign_flip_test(np.ones(1000)) == 2 / 2**1000 and sign_flip_test(np.ones(4000)) == 0.0


def test_a_few_changes_of_different_sizes_are_enumerated() -> None:
    changes = np.array([0.1, 0.2, 0.3, -0.05, 0.0, 0.7])
    sizes = np.abs(changes[changes != 0])
    sums = [abs(sum(sign * size for sign, size in zip(signs, sizes, strict=True))) for signs in itertools.product((1, -1), repeat=5)]
    assert sign_flip_test(changes) == pytest.approx(np.mean([each >= changes.sum() - 1e-12 for each in sums]))


def test_many_changes_are_drawn_and_agree_with_the_normal_distribution() -> None:
    changes = np.random.default_rng(5).normal(0.1, 1.0, size=300)
    z = changes.sum() / np.sqrt((changes**2).sum())
    p_value = sign_flip_test(changes)
    assert p_value == sign_flip_test(changes.copy()) == pytest.approx(math.erfc(abs(z) / 2**0.5), abs=0.01)
    assert sign_flip_test(np.random.default_rng(5).normal(5.0, 1.0, size=300)) == 1 / 20_001


def test_a_test_of_equals_is_as_often_below_its_level_as_it_says() -> None:
    random = np.random.default_rng(11)
    found = [sign_flip_test(random.binomial(4, 0.5, size=40) / 4 - random.binomial(4, 0.5, size=40) / 4) for _ in range(60)]
    assert np.mean(np.array(found) < 0.2) < 0.35


def test_the_interval_of_right_and_wrong_holds_also_where_few_prompts_differ() -> None:
    ones = np.ones(50)
    low, high = difference_interval(ones, ones)
    assert low == pytest.approx(-high) and 0 < high < 0.1, "no prompt differs, and the next one may"
    # By hand: 50 prompts, 10 gained and 4 lost, half a pair added to each outcome.
    first, second = np.array([0.0] * 10 + [1.0] * 4 + [1.0] * 36), np.array([1.0] * 10 + [0.0] * 4 + [1.0] * 36)
    assert difference_interval(first, second) == pytest.approx((6 / 52 - 1.959964 * (15 - 36 / 52) ** 0.5 / 52, 0.25797), abs=1e-4)
    assert difference_interval(first / 2, second) == mean_interval(second - first / 2)


def test_that_interval_holds_the_truth_as_often_as_it_says() -> None:
    random, held = np.random.default_rng(2), []
    for _ in range(1000):
        outcome = random.choice(4, size=40, p=(0.15, 0.05, 0.4, 0.4))  # gained, lost, both wrong, both right
        first, second = np.isin(outcome, (1, 3)).astype(float), np.isin(outcome, (0, 3)).astype(float)
        low, high = difference_interval(first, second)
        held.append(low <= 0.1 <= high)
    assert 0.93 <= np.mean(held) <= 0.98


def test_sets_are_compared_prompt_by_prompt_however_they_are_ordered() -> None:
    first = played([[0.0], [1.0], [0.0], [0.5]])
    second = played([[1.0], [1.0], [1.0], [0.25]])
    second = replace(second, prompts=second.prompts[::-1])
    compared = compare_sets(first, second, num_changes=2)
    accuracy, reward = compared.differences
    assert (accuracy.score, accuracy.first, accuracy.second, accuracy.num_better, accuracy.num_worse) == ("accuracy", 0.25, 0.75, 2, 0)
    assert accuracy.p_value == 0.5 and accuracy.difference == 0.5
    assert (reward.score, reward.difference, reward.num_better, reward.num_worse) == ("mean reward", 1.75 / 4, 2, 1)
    assert [(change.prompt, change.difference) for change in compared.changes] == [("0>", 1.0), ("2>", 1.0)]
    assert compared.mismatch == "" and compared.title == "held-out"


def test_the_same_rewards_in_another_order_are_no_change() -> None:
    compared = compare_sets(played([[0.1, 0.2, 0.3]] * 12 + [[0.5] * 3]), played([[0.3, 0.2, 0.1]] * 12 + [[0.75] * 3]))
    reward = compared.differences[-1]
    assert (reward.score, reward.num_better, reward.num_worse, reward.p_value) == ("mean reward", 1, 0, 1.0)
    assert [change.prompt for change in compared.changes] == ["12>"]


def test_several_answers_are_also_compared_by_pass_at_k() -> None:
    first, second = played([[1.0, 0.0, 0.0], [0.0] * 3], pass_at=(2,)), played([[0.0] * 4, [1.0, 1.0, 0.0, 0.0]])
    found = {each.score: each for each in compare_sets(first, second).differences}
    assert list(found) == ["accuracy", "pass@2", "pass@3", "mean reward"]
    assert (found["pass@2"].first, found["pass@2"].second) == pytest.approx((1 / 3, 5 / 12))


def test_only_prompts_that_both_have_are_compared_and_it_is_said() -> None:
    first, second = played([[1.0]] * 4, name="sums"), played([[0.0]] * 5, name="sums", first=2)
    compared = compare_sets(first, second)
    assert (compared.num_prompts, compared.num_only_first, compared.num_only_second) == (2, 2, 3)
    assert compared.mismatch == (
        "sums: the two evaluations did not ask the same prompts; the 2 that both asked are compared, and 2 of the first alone and 3 of the"
        " second alone are left out")
    twice = replace(first, prompts=first.prompts[3:] * 2)
    assert compare_sets(twice, second).num_prompts == 1, "a prompt that one asked twice is a pair once"
    with pytest.raises(DataError, match="sums: the two evaluations have no prompt in common, of 4 and 1"):
        compare_sets(first, played([[1.0]], name="sums", first=9))


def test_evaluations_are_compared_by_the_sets_that_both_have() -> None:
    held_out, sums, games = played([[1.0]]), played([[1.0]], name="sums"), played([[1.0]], name="games")
    assert [each.name for each in compare({"": held_out, "sums": sums}, {"sums": sums, "games": games})] == ["sums"]
    with pytest.raises(DataError, match="no set in common: one has held-out; the other has games"):
        compare({"": held_out}, {"games": games})
