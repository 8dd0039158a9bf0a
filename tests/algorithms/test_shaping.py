"""Rewards after bias, scale, clip and penalties for length, by hand and against a slow version."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.algorithms.shaping import length_penalties, overlong_penalties, shaped_rewards
from offbeat.config.algorithms import AlgorithmConfig


def shaped(rewards_KN, num_generated, groups=None, *, longest=None, malformed=0, max_new_tokens=100, **settings):
    rewards_KN = np.array(rewards_KN, float)
    return shaped_rewards(
        rewards_KN, group_ids=np.array(groups or [0] * rewards_KN.shape[1]), num_generated=np.array(num_generated),
        longest_answers=np.array(num_generated if longest is None else longest), num_malformed=np.array(malformed),
        config=AlgorithmConfig(**settings), max_new_tokens=max_new_tokens)


def test_nothing_is_done_by_default():
    np.testing.assert_array_equal(shaped([[1.0, -3.0, math.nan]], [1, 2, 3]), [[1.0, -3.0, math.nan]])


def test_the_bias_is_scaled_and_the_clip_comes_last():
    got = shaped([[1.0, -9.0, 30.0]], [1, 1, 1], reward_bias=1.0, reward_scale=2.0, reward_clip=10.0)
    np.testing.assert_array_equal(got, [[4.0, -10.0, 10.0]])


def test_a_soft_overlong_penalty_begins_at_its_buffer_and_ends_at_the_limit():
    # The last 20 of 100 tokens; nothing lies beyond the limit, but it would not cost more.
    got = overlong_penalties(np.array([0, 80, 85, 90, 100, 150]), max_new_tokens=100, buffer_share=0.2, largest=1.0)
    np.testing.assert_allclose(got, [0, 0, 0.25, 0.5, 1, 1])
    np.testing.assert_allclose(
        shaped([[1.0, 1.0]], [90, 10], overlong_buffer_share=0.2, overlong_penalty=0.5), [[0.75, 1.0]])
    assert not overlong_penalties(np.array([100]), max_new_tokens=100, buffer_share=0.0, largest=1.0).any()


def test_a_length_penalty_is_a_share_of_the_groups_mean_for_its_longest_answer():
    got = shaped([[1.0, 0.0, 3.0, 3.0]], [4, 2, 10, 5], [0, 0, 1, 1], length_penalty=0.25)
    np.testing.assert_allclose(got, [[1 - 0.5 * 0.25, -0.5 * 0.25 / 2, 3 - 3 * 0.25, 3 - 3 * 0.25 / 2]])
    assert not length_penalties(np.ones(2), group_ids=np.zeros(2, int), num_generated=np.zeros(2, int)).any()


def test_an_episode_is_overlong_by_its_longest_answer_and_pays_for_each_call_that_cannot_be_read():
    got = shaped([[1.0, 1.0]], [300, 300], longest=[90, 60], malformed=[0, 2], overlong_buffer_share=0.2, malformed_penalty=0.25)
    np.testing.assert_allclose(got, [[0.5, 0.5]])


def test_named_rewards_are_added_up_and_one_that_is_missing_adds_nothing():
    rewards_KN = [[1.0, 0.0, math.nan, math.nan], [0.5, 0.5, 0.25, math.nan]]
    np.testing.assert_array_equal(shaped(rewards_KN, [1] * 4), [[1.5, 0.5, 0.25, math.nan]])
    kept = shaped(rewards_KN, [1] * 4, separate_rewards=True, reward_scale=2.0)
    np.testing.assert_array_equal(kept, 2 * np.array(rewards_KN))


def test_penalties_are_a_reward_of_their_own_where_rewards_stay_separate():
    got = shaped([[1.0, 1.0], [0.0, 1.0]], [90, 100], separate_rewards=True, overlong_buffer_share=0.2, length_penalty=0.5)
    np.testing.assert_allclose(got[:2], [[1.0, 1.0], [0.0, 1.0]])
    np.testing.assert_allclose(got[2], [-0.5 - 0.5 * 1.5 * 0.9, -1.0 - 0.5 * 1.5])


@given(st.lists(st.tuples(st.floats(-30, 30) | st.just(math.nan), st.integers(0, 3), st.integers(0, 60)), min_size=1, max_size=12))
def test_all_of_it_agrees_with_plain_loops(samples):
    settings = {"reward_bias": -0.5, "reward_scale": 3.0, "reward_clip": 20.0, "overlong_buffer_share": 0.3, "overlong_penalty": 2.0,
                "length_penalty": 0.25}
    values = [max(-20.0, min(20.0, (r - 0.5) * 3)) if math.isfinite(r) else r for r, _, _ in samples]
    want = []
    for value, (_, group, length) in zip(values, samples, strict=True):
        own = [v for v, (_, g, _) in zip(values, samples, strict=True) if g == group and math.isfinite(v)]
        longest = max(n for _, g, n in samples if g == group)
        mean = sum(own) / len(own) if own else 0.0
        over = min(max(length - (50 - 15), 0), 15) / 15 * 2.0
        want.append(value - over - (mean * 0.25 * length / longest if longest else 0.0))
    rewards, groups, lengths = zip(*samples, strict=True)
    np.testing.assert_allclose(shaped([rewards], lengths, list(groups), max_new_tokens=50, **settings)[0], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("separate", [True, False])
def test_no_trajectories_have_no_rewards(separate):
    assert shaped(np.zeros((1, 0)), [], separate_rewards=separate, length_penalty=0.5).size == 0
