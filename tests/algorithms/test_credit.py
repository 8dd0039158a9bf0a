"""Credit against hand-computed numbers, and against slow versions that are written as loops over plain numbers."""

import math
import statistics
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.algorithms.credit import outcome_advantages, rewards_to_go, whitened_sequences, whitened_tokens
from offbeat.errors import DataError

CENTRES, SCALES = ("group", "leave_one_out", "length_weighted", "none"), ("none", "group_std", "batch_std", "group_mean")
REWARD = st.one_of(st.sampled_from([0.0, 1.0, 0.1, 0.5, 1e9, math.nan]), st.floats(0, 100, width=32))
SAMPLES = st.lists(st.tuples(REWARD, st.integers(-2, 3), st.integers(0, 9)), min_size=1, max_size=30)


def credit(rewards, groups, *, centre="group", scale="none", num_tokens=None):
    tokens = np.ones(len(rewards), int) if num_tokens is None else np.array(num_tokens)
    return outcome_advantages(
        np.array(rewards, float), group_ids=np.array(groups, int), num_tokens=tokens, centre=centre, scale=scale)


def slow(rewards, groups, num_tokens, *, centre, scale):
    """One trajectory after another, each with its group looked up anew."""
    everyone, out = [r for r in rewards if math.isfinite(r)], []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        everything = enumerate(zip(rewards, groups, num_tokens, strict=True))
        group_of = [(r, n, j) for j, (r, g, n) in everything if g == group and math.isfinite(r)]
        members = [r for r, _, _ in group_of]
        if not math.isfinite(reward) or (centre != "none" and len(set(members)) == 1):
            out.append(0.0)
            continue
        if centre == "leave_one_out":
            value = reward - statistics.fmean(r for r, _, j in group_of if j != i)
        elif centre == "length_weighted":
            tokens = sum(n for _, n, _ in group_of)
            value = reward - math.fsum(r * n for r, n, _ in group_of) / tokens if tokens else 0.0
        else:
            value = reward - (statistics.fmean(members) if centre == "group" else 0.0)
        if scale == "group_std":
            value /= statistics.stdev(members) + 1e-6
        elif scale == "batch_std":
            value /= (statistics.stdev(everyone) if len(everyone) > 1 else 0.0) + 1e-6
        elif scale == "group_mean":
            value = value / statistics.fmean(members) if statistics.fmean(members) > 0 else 0.0
        out.append(value)
    return out


def test_hand_computed_groups_of_unequal_size_and_interleaved():
    rewards, groups = [1, 0, 4, 0, 2, 0], [7, 7, 3, 7, 3, 7]
    np.testing.assert_allclose(credit(rewards, groups), [0.75, -0.25, 1, -0.25, -1, -0.25])
    # Sample deviations: sqrt((0.75^2 + 3 * 0.25^2) / 3) = 0.5 and sqrt(2).
    np.testing.assert_allclose(
        credit(rewards, groups, scale="group_std"), [1.5, -0.5, 0.5**0.5, -0.5, -(0.5**0.5), -0.5], rtol=1e-5)
    np.testing.assert_allclose(credit(rewards, groups, scale="group_mean"), [3, -1, 1 / 3, -1, -1 / 3, -1])
    np.testing.assert_allclose(credit(rewards, groups, centre="leave_one_out"), [1, -1 / 3, 2, -1 / 3, -2, -1 / 3])


def test_a_leave_one_out_baseline_weighs_samples_and_not_their_tokens():
    np.testing.assert_allclose(credit([1, 0], [0, 0], centre="leave_one_out", num_tokens=[3, 1]), [1, -1])
    np.testing.assert_allclose(credit([1, 0], [0, 0], centre="length_weighted", num_tokens=[3, 1]), [0.25, -0.75])


@pytest.mark.parametrize("centre", CENTRES[:3])
@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_groups_of_one_and_missing_rewards_are_exactly_zero(centre, scale):
    # The float mean of three times 0.1 is not 0.1.
    out = credit([0.1, 0.1, 0.1, 5.0, math.nan, 2.0, math.inf], [0, 0, 0, 1, 2, 2, 0], centre=centre, scale=scale)
    assert (out == 0).all()


def test_a_missing_reward_leaves_its_group():
    with_it = credit([1, math.nan, 0, 0.5], [0, 0, 0, 0], scale="group_std")
    np.testing.assert_array_equal(with_it[[0, 2, 3]], credit([1, 0, 0.5], [0, 0, 0], scale="group_std"))
    assert with_it[1] == 0


def test_no_trajectories_have_no_advantages():
    for centre in CENTRES:
        for scale in SCALES:
            assert credit([], [], centre=centre, scale=scale).shape == (0,)


def test_a_negative_reward_cannot_be_divided_by_its_groups_mean():
    with pytest.raises(DataError, match=r"rewards must be at least 0 with algorithm.scale = 'group_mean' .*, got -0.5"):
        credit([1, -0.5], [0, 0], scale="group_mean")


@pytest.mark.parametrize("centre", CENTRES)
@pytest.mark.parametrize("scale", SCALES)
@given(samples=SAMPLES)
def test_every_centre_and_scale_agrees_with_the_slow_version(centre, scale, samples):
    if centre == "none" and scale != "none":
        return  # refused by the configuration
    rewards, groups, num_tokens = zip(*samples, strict=True)
    want = np.array(slow(rewards, groups, num_tokens, centre=centre, scale=scale))
    largest = max([1.0, *(r for r in rewards if math.isfinite(r))])
    # Centring numbers near 1e9 leaves errors near 1e-7, and dividing by 1e-6 enlarges them.
    tolerance = 1e-14 * largest if scale == "none" else 1e-7 * largest
    np.testing.assert_allclose(
        credit(rewards, groups, centre=centre, scale=scale, num_tokens=num_tokens), want, rtol=1e-6, atol=max(tolerance, 1e-7))


@given(SAMPLES)
def test_leave_one_out_is_the_groups_centring_times_n_over_n_minus_1(samples):
    rewards, groups, _ = zip(*samples, strict=True)
    counts = [sum(g == group and math.isfinite(r) for r, g, _ in samples) for group in groups]
    factors = np.array([n / (n - 1) if n > 1 else 0.0 for n in counts])
    np.testing.assert_allclose(credit(rewards, groups, centre="leave_one_out"), credit(rewards, groups) * factors, rtol=1e-12)


def test_a_reward_far_above_the_others_keeps_the_small_differences_of_another_group():
    out = credit([1e12, 0, 1.0, 1.0 + 1e-6], [0, 0, 1, 1], scale="group_std")
    np.testing.assert_allclose(out[2:], [-0.5e-6 / (1e-6 * 0.5**0.5 + 1e-6), 0.5e-6 / (1e-6 * 0.5**0.5 + 1e-6)], rtol=1e-6)


@given(st.lists(st.lists(st.floats(-10, 10), max_size=7), max_size=6), st.sampled_from([1.0, 0.9, 0.5]))
def test_rewards_to_go_agree_with_sums_over_later_tokens(sequences, gamma):
    offsets = np.cumsum([0, *map(len, sequences)])
    flat = np.array([reward for sequence in sequences for reward in sequence])
    want = [sum(gamma ** (s - t) * sequence[s] for s in range(t, len(sequence))) for sequence in sequences for t in range(len(sequence))]
    np.testing.assert_allclose(rewards_to_go(flat, offsets=offsets, gamma=gamma), want, rtol=1e-12, atol=1e-12)
    for start, end in pairwise(offsets):  # nothing crosses from one trajectory to another
        np.testing.assert_array_equal(
            rewards_to_go(flat[start:end], offsets=np.array([0, end - start]), gamma=gamma),
            rewards_to_go(flat, offsets=offsets, gamma=gamma)[start:end])


@given(st.lists(st.floats(-1e6, 1e6), max_size=20))
def test_whitening_agrees_with_the_slow_version_and_equal_values_are_zero(values):
    tokens = whitened_tokens(np.array(values, float))
    if len(set(values)) <= 1:
        assert (tokens == 0).all() and len(tokens) == len(values)
    else:
        mean, variance = statistics.fmean(values), statistics.pvariance(values)
        np.testing.assert_allclose(tokens, [(v - mean) / math.sqrt(variance + 1e-8) for v in values], rtol=1e-6, atol=1e-6)
    counted = np.array([i % 3 != 1 for i in range(len(values))], bool)
    own = [v for v, c in zip(values, counted, strict=True) if c]
    if len(set(own)) > 1:
        want = [(v - statistics.fmean(own)) / (statistics.stdev(own) + 1e-6) if c else 0.0 for v, c in zip(values, counted, strict=True)]
    else:
        want = [0.0] * len(values)
    np.testing.assert_allclose(whitened_sequences(np.array(values, float), counted=counted), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("centre", CENTRES)
def test_rows_of_one_episode_with_equal_rewards_are_its_one_row(centre, scale):
    rewards, groups, tokens = [1.0, 0.0, 3.0, 2.0, 2.5], [0, 0, 0, 1, 1], [4, 2, 6, 3, 5]
    times = np.array([3, 1, 2, 1, 4])
    rows = np.repeat(np.arange(5), times)
    found = outcome_advantages(
        np.array(rewards)[rows], group_ids=np.array(groups)[rows], num_tokens=(np.array(tokens) / times)[rows], centre=centre, scale=scale,
        episodes=rows)
    np.testing.assert_allclose(found, np.array(credit(rewards, groups, centre=centre, scale=scale, num_tokens=tokens))[rows], rtol=1e-12)
    values = np.array([0.5, -1.0, 2.0, 0.0, 7.0])
    np.testing.assert_allclose(
        whitened_sequences(values[rows], counted=rows != 3, episodes=rows),
        whitened_sequences(values, counted=np.arange(5) != 3)[rows], rtol=1e-12)


def test_a_group_of_one_episode_is_zero_however_its_rows_differ():
    for centre in CENTRES[:3]:
        assert not outcome_advantages(
            np.array([1.0, -1.0]), group_ids=np.zeros(2, int), num_tokens=np.ones(2), centre=centre, scale="group_std",
            episodes=np.zeros(2, int)).any()
