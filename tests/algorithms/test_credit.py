"""Group-relative advantages against hand-computed numbers and a slow version."""

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.algorithms.advantages import group_advantages

REWARD = st.one_of(st.sampled_from([0.0, 1.0, 0.1, -0.5]), st.floats(-100, 100, width=32))


def slow(rewards, group_ids, *, scale_by_std):
    out = []
    for reward, group in zip(rewards, group_ids, strict=True):
        members = [r for r, g in zip(rewards, group_ids, strict=True) if g == group]
        value = reward - statistics.fmean(members)
        if len(set(members)) == 1:
            value = 0.0
        elif scale_by_std:
            value /= statistics.stdev(members) + 1e-6
        out.append(value)
    return out


def test_hand_computed_groups_of_unequal_size_and_interleaved():
    rewards, groups = np.array([1, 0, 4, 0, 2, 0]), np.array([7, 7, 3, 7, 3, 7])
    centered = group_advantages(rewards, group_ids=groups, scale_by_std=False)
    np.testing.assert_allclose(centered, [0.75, -0.25, 1, -0.25, -1, -0.25])
    scaled = group_advantages(rewards, group_ids=groups, scale_by_std=True)
    # Sample deviations: sqrt((0.75^2 + 3 * 0.25^2) / 3) = 0.5 and sqrt(2).
    np.testing.assert_allclose(scaled, [1.5, -0.5, 0.5**0.5, -0.5, -(0.5**0.5), -0.5], rtol=1e-5)
    assert scaled.dtype == np.float32


@pytest.mark.parametrize("scale_by_std", [True, False])
def test_equal_rewards_and_groups_of_one_are_exactly_zero(scale_by_std):
    # The float mean of three times 0.1 is not 0.1.
    out = group_advantages(np.array([0.1, 0.1, 0.1, 5.0]), group_ids=np.array([0, 0, 0, 1]), scale_by_std=scale_by_std)
    assert (out == 0).all()


def test_no_trajectories_have_no_advantages():
    assert group_advantages(np.zeros(0), group_ids=np.zeros(0, int), scale_by_std=True).shape == (0,)


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="rewards must be finite, got nan"):
        group_advantages(np.array([1.0, np.nan]), group_ids=np.zeros(2, int), scale_by_std=True)


@given(st.lists(st.tuples(REWARD, st.integers(-2, 3)), min_size=1, max_size=30), st.booleans())
def test_it_agrees_with_the_slow_version(pairs, scale_by_std):
    rewards, groups = zip(*pairs, strict=True)
    out = group_advantages(np.array(rewards), group_ids=np.array(groups), scale_by_std=scale_by_std)
    np.testing.assert_allclose(out, slow(rewards, groups, scale_by_std=scale_by_std), rtol=1e-4, atol=1e-4)
