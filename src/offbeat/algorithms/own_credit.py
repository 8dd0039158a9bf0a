"""Credit from a file of the user's own, `algorithm.credit = "my_credit.py:my_credit"`.

    import numpy as np
    from offbeat.algorithms.own_credit import SampleGroups

    def my_credit(groups: SampleGroups, constants: dict) -> np.ndarray:
        return groups.rewards - groups.mean(groups.rewards)

Called by `experience` once for each batch, in the controller, which has no torch. `check_credit` tries it out before a run.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offbeat.data.functions import blaming, resolve
from offbeat.data.trajectory import Trajectory
from offbeat.errors import CodeError, OwnCodeError, shorten


@dataclass(frozen=True, eq=False)
class SampleGroups:
    """N samples of a training step; the samples of one prompt are a group, and stand next to each other.

    Samples that cannot be trained on, such as those whose reward failed, are left out.

    Attributes:
        rewards: [N] float64, after bias, scale, clip and penalties; those of several names are added up.
        named_rewards: [N] float64 each, by name, as the reward function returned them; NaN where a sample has none of that name.
        group_ids: [N] int64, ascending, the group of each sample.
        lengths: [N] int64, T_i, number of trained tokens of each sample; 0 for one that was cut off with `algorithm.mask_truncated`.
        turns: N arrays [T_i] int64, the turn in which each trained token was generated, from 0. Turns are parted by what the policy did not
            generate, such as the output of a tool.
        versions: N arrays [T_i] int64, the version of the weights that sampled each trained token.
    """

    rewards: np.ndarray
    named_rewards: Mapping[str, np.ndarray]
    group_ids: np.ndarray
    lengths: np.ndarray
    turns: Sequence[np.ndarray]
    versions: Sequence[np.ndarray]

    def __len__(self) -> int:
        return len(self.rewards)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return [N] float64: for each sample, the mean of `values` [N] over its group."""
        _, group, counts = np.unique(self.group_ids, return_inverse=True, return_counts=True)
        return (np.bincount(group, values) / counts)[group]


OwnCredit = Callable[[SampleGroups, dict[str, Any]], Any]


def sample_groups(
    trajectories: Sequence[Trajectory], rewards: np.ndarray, *, named_rewards: Mapping[str, np.ndarray], group_ids: np.ndarray,
    lengths: np.ndarray,
) -> SampleGroups:
    """Describe N usable trajectories to a user's function; arrays are as in `SampleGroups`."""
    turns, versions = [], []
    for trajectory, length in zip(trajectories, lengths, strict=True):
        mask = trajectory.loss_mask if length else np.zeros(len(trajectory), np.bool_)
        begins = mask & ~np.concatenate([[False], mask[:-1]])
        turns.append((np.cumsum(begins) - 1)[mask])
        versions.append(trajectory.versions[mask].astype(np.int64))
    return SampleGroups(rewards.astype(np.float64), dict(named_rewards), group_ids, lengths, turns, versions)


def own_advantages(name: str, groups: SampleGroups, constants: Mapping[str, Any]) -> np.ndarray:
    """Return [sum of T_i] float64, the advantages of all trained tokens, sample by sample, that a user's function gives.

    Args:
        name: "path/to/file.py:function" or "module:function".

    Raises:
        CodeError: there is no such function.
        OwnCodeError: it raised an exception, or returned something else than finite numbers of the right shape; names its file.
    """
    function: OwnCredit = resolve(name, kind="credit")
    with blaming(name, function, kind="credit"):
        found = function(groups, dict(constants))
    try:
        advantages = _by_token(found, groups.lengths)
    except (TypeError, ValueError):
        advantages = None
    if advantages is None:
        raise OwnCodeError(
            f"credit {name!r} must return an array of {len(groups)} numbers, one for each sample, or a list of {len(groups)} arrays, one"
            f" number for each trained token of a sample, got {_described(found)}")
    if not np.isfinite(advantages).all():
        raise OwnCodeError(
            f"credit {name!r} must return finite numbers, got {advantages[~np.isfinite(advantages)][0]}; give 0 where nothing can be said")
    return advantages


def check_credit(name: str, constants: Mapping[str, Any]) -> None:
    """Call a credit function once with made-up samples.

    Raises:
        CodeError: it cannot be loaded, imports torch, raises an exception, or does not return finite numbers of the right shape.
    """
    had_torch = "torch" in sys.modules
    try:
        own_advantages(name, _example(), constants)
    except OwnCodeError as exc:
        raise CodeError(f"algorithm.credit: {exc}, when it was tried out on made-up samples") from exc
    if not had_torch and "torch" in sys.modules:
        raise CodeError(
            f"algorithm.credit = {name!r} imports torch, which the controller never loads; compute with numpy, in a file of its own if an"
            " objective is in the same")


def _example() -> SampleGroups:
    """Return seven samples of three prompts: of unequal lengths, one without trained tokens, one group of equal rewards, one of one."""
    lengths = np.array([3, 1, 6, 2, 0, 4, 5])
    rewards = np.array([1.0, 0.0, 0.5, 1.0, 1.0, 1.0, -2.0])
    return SampleGroups(
        rewards, {"right": np.array([1.0, 0.0, np.nan, 1.0, 1.0, 1.0, -2.0]), "form": np.array([0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0])},
        np.array([0, 0, 0, 1, 1, 1, 2]), lengths, [np.arange(length) // 3 for length in lengths],
        [np.arange(length) // 4 + 5 for length in lengths])


def _by_token(found: Any, lengths: np.ndarray) -> np.ndarray | None:
    """Return [sum of T_i] float64; None if there is not one number, or T_i numbers, for each sample."""
    if len(found) != len(lengths):
        return None
    if all(np.ndim(own) == 0 for own in found):
        return np.repeat(np.asarray(found, np.float64), lengths)
    arrays = [np.asarray(own, np.float64) for own in found]
    if any(own.shape != (length,) for own, length in zip(arrays, lengths, strict=True)):
        return None
    return np.concatenate([np.zeros(0), *arrays])


def _described(found: Any) -> str:
    if isinstance(found, np.ndarray):
        return f"an array of shape {found.shape}"
    if isinstance(found, list | tuple):
        return f"a {type(found).__name__} of {len(found)} with shapes {[np.shape(own) for own in found[:5]]}"
    return shorten(found)
