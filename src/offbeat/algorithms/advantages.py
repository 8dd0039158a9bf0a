"""Advantages: how much better a trajectory was than the others of its prompt. Numpy only; computed in the controller."""

import numpy as np

_EPS = 1e-6


def group_advantages(rewards: np.ndarray, *, group_ids: np.ndarray, scale_by_std: bool) -> np.ndarray:
    """Center rewards within each prompt's group; groups may differ in size.

    Args:
        rewards: [N] finite, one per trajectory.
        group_ids: [N] integers; trajectories with equal ids form a group.
        scale_by_std: divide by the group's sample standard deviation (over n - 1) + 1e-6 (GRPO); False is Dr. GRPO.

    Returns:
        [N] float32; each group sums to 0. A group of one, or of equal rewards, is exactly 0.

    Raises:
        ValueError: a reward is not finite.

    Source: GRPO, arXiv:2402.03300 section 4.1.2; Dr. GRPO, arXiv:2503.20783.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards[~np.isfinite(rewards)][0]}")
    _, group, counts = np.unique(group_ids, return_inverse=True, return_counts=True)
    centered = rewards - (np.bincount(group, rewards, minlength=len(counts)) / counts)[group]
    # The mean of equal numbers may be rounded to another number; their advantages must be exactly 0 to be dropped.
    lowest, highest = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    np.minimum.at(lowest, group, rewards)
    np.maximum.at(highest, group, rewards)
    centered[(lowest == highest)[group]] = 0.0
    if scale_by_std:
        std = np.sqrt(np.bincount(group, centered**2, minlength=len(counts)) / np.maximum(counts - 1, 1))
        centered /= (std + _EPS)[group]
    return centered.astype(np.float32)
