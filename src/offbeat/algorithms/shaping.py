"""Shapes rewards before credit is computed from them. Numpy in float64; called by `experience`.

In this order: bias, scale and clip of each reward; then penalties for length, which depend on the sum of a sample's rewards, and for calls
that could not be read. A sample holds all trajectories of one agent in an episode.
"""

import numpy as np

from offbeat.config.algorithms import AlgorithmConfig


def shaped_rewards(
    rewards_KN: np.ndarray, *, group_ids: np.ndarray, num_generated: np.ndarray, longest_answers: np.ndarray, num_malformed: np.ndarray,
    config: AlgorithmConfig, max_new_tokens: int,
) -> np.ndarray:
    """Return the rewards that credit is computed from, [1, N] float64, or [K, N] with `config.separate_rewards`.

    Without it, the named rewards of a trajectory are added up first. With it, penalties are one more row of rewards.

    Args:
        rewards_KN: [K, N] float64, K named rewards of each trajectory; NaN where it has none of that name.
        group_ids: [N] integers; trajectories with equal ids form a group.
        num_generated: [N], number of tokens that the policy generated.
        longest_answers: [N], number of those in the longest turn.
        num_malformed: [N], number of tool calls that could not be read.
        max_new_tokens: length at which answers are cut off.
    """
    if not config.separate_rewards:
        rewards_KN = _sum(rewards_KN)[None]
    rewards_KN = (rewards_KN + config.reward_bias) * config.reward_scale
    if config.reward_clip:
        rewards_KN = np.clip(rewards_KN, -config.reward_clip, config.reward_clip)
    if not config.has_penalties:
        return rewards_KN
    penalties = overlong_penalties(
        longest_answers, max_new_tokens=max_new_tokens, buffer_share=config.overlong_buffer_share, largest=config.overlong_penalty)
    penalties += config.length_penalty * length_penalties(_sum(rewards_KN), group_ids=group_ids, num_generated=num_generated)
    penalties += config.malformed_penalty * num_malformed
    return np.vstack([rewards_KN, -penalties]) if config.separate_rewards else rewards_KN - penalties


def overlong_penalties(lengths: np.ndarray, *, max_new_tokens: int, buffer_share: float, largest: float) -> np.ndarray:
    """Return [N] float64, penalties that rise from 0 to `largest` over the last `buffer_share` of `max_new_tokens`, and no further.

    For example 90 tokens of 100 give half of `largest` with a `buffer_share` of 0.2. Source: DAPO, arXiv:2503.14476 section 3.4.
    """
    buffer = buffer_share * max_new_tokens
    if not buffer:
        return np.zeros(len(lengths))
    return np.clip(lengths - (max_new_tokens - buffer), 0.0, buffer) / buffer * largest


def length_penalties(rewards: np.ndarray, *, group_ids: np.ndarray, num_generated: np.ndarray) -> np.ndarray:
    """Return [N] float64, the group's mean reward times the trajectory's share of the group's longest answer, as in prime-rl.

    For a mean reward of 0.5, answers of 10 and 20 tokens give [0.25, 0.5]. Rewards [N] that are not finite count in no mean.
    """
    _, group = np.unique(group_ids, return_inverse=True)
    num_groups, finite = int(group.max(initial=-1)) + 1, np.isfinite(rewards)
    counts = np.bincount(group[finite], minlength=num_groups)
    means = np.bincount(group[finite], rewards[finite], minlength=num_groups) / np.maximum(counts, 1)
    longest = np.zeros(num_groups)
    np.maximum.at(longest, group, num_generated)
    return means[group] * num_generated / np.maximum(longest, 1)[group]


def _sum(rewards_KN: np.ndarray) -> np.ndarray:
    """Return [N] float64; a reward that a trajectory lacks adds nothing, and one without any has the sum NaN."""
    if len(rewards_KN) == 1:
        return rewards_KN[0]
    return np.where(np.isnan(rewards_KN).all(axis=0), np.nan, np.nansum(rewards_KN, axis=0))
