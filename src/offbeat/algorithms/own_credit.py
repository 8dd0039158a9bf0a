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

from offbeat.algorithms.episodes import Episodes, turn_of_tokens
from offbeat.errors import CodeError, OwnCodeError, shorten
from offbeat.user_code.functions import blaming, resolve


@dataclass(frozen=True, eq=False)
class SampleGroups:
    """N samples of a training step; the samples of one prompt are a group, and stand next to each other.

    A sample is a trajectory; an episode may have several, which share a reward. Unusable ones, as with a failed reward, are left out.

    Attributes:
        rewards: [N] float64, after bias, scale, clip and penalties; those of several names, and of turns, are added up.
        named_rewards: [N] float64 each, by name, as the reward function returned them; NaN where a sample has none of that name.
        group_ids: [N] int64, ascending, the group of each sample.
        lengths: [N] int64, T_i, number of trained tokens of each sample; 0 for one that was cut off with `algorithm.mask_truncated`.
        turns: N arrays [T_i] int64, the turn of each trained token, such as [0, 0, 1]. Where a workflow does not tell its turns,
            tokens that the policy did not generate, such as the output of a tool, separate them.
        versions: N arrays [T_i] int64, the version of the weights that sampled each trained token.
        episodes: [N] int64, ascending, the episode of each sample.
        agents: N names, who wrote each sample; "" where nobody was named.
        turn_rewards: N arrays, the reward of each turn, before scale.
        states: N tuples, the state in which each turn was played; "" where it has none.
    """

    rewards: np.ndarray
    named_rewards: Mapping[str, np.ndarray]
    group_ids: np.ndarray
    lengths: np.ndarray
    turns: Sequence[np.ndarray]
    versions: Sequence[np.ndarray]
    episodes: np.ndarray
    agents: Sequence[str]
    turn_rewards: Sequence[np.ndarray]
    states: Sequence[tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.rewards)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return [N] float64: for each sample, the mean of `values` [N] over its group, in which each episode counts once."""
        _, group = np.unique(self.group_ids, return_inverse=True)
        _, episode, sizes = np.unique(self.episodes, return_inverse=True, return_counts=True)
        weights = 1 / sizes[episode]
        return (np.bincount(group, weights * values) / np.bincount(group, weights))[group]


OwnCredit = Callable[[SampleGroups, dict[str, Any]], Any]


def sample_groups(episodes: Episodes, rewards: np.ndarray, *, lengths: np.ndarray) -> SampleGroups:
    """Describe usable trajectories to a user's function: shaped rewards [U] float64 of parts, `lengths` [N] int64 of `SampleGroups`."""
    turns, versions = [], []
    for trajectory, length in zip(episodes.trajectories, lengths, strict=True):
        turns.append(turn_of_tokens(trajectory) if length else np.zeros(0, np.int64))
        versions.append(trajectory.versions[trajectory.loss_mask].astype(np.int64) if length else np.zeros(0, np.int64))
    calls = [trajectory.calls for trajectory in episodes.trajectories]
    return SampleGroups(
        rewards[episodes.part_ids], dict(zip(episodes.names, episodes.rewards[:, episodes.part_ids], strict=True)), episodes.group_ids,
        lengths, turns, versions, episodes.episode_ids, tuple(t.agent for t in episodes.trajectories),
        [np.array([turn.reward for turn in own], np.float64) for own in calls], [tuple(turn.state for turn in own) for own in calls])


def own_advantages(name: str, groups: SampleGroups, constants: Mapping[str, Any]) -> np.ndarray:
    """Return the advantages of all M trained tokens, [M] float64, sample by sample, by a function such as "my_credit.py:my_credit".

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

    Raises CodeError if it cannot be loaded, imports torch, raises an exception, or does not return finite numbers [N].
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
    """Return seven samples of three prompts: of unequal lengths, one without trained tokens, one group of equal rewards, one of one.

    Two samples of the first group are of one episode.
    """
    lengths = np.array([3, 1, 6, 2, 0, 4, 5])
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, -2.0])
    num_turns = np.maximum(-(-lengths // 3), 1)
    return SampleGroups(
        rewards, {"right": np.array([1.0, 0.0, np.nan, 1.0, 1.0, 1.0, -2.0]), "form": np.array([0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0])},
        np.array([0, 0, 0, 1, 1, 1, 2]), lengths, [np.arange(length) // 3 for length in lengths],
        [np.arange(length) // 4 + 5 for length in lengths], np.array([0, 1, 1, 2, 3, 4, 5]), ("",) * 7,
        [np.full(turns, 0.5) for turns in num_turns], [("start", *[""] * (turns - 1)) for turns in num_turns])


def _by_token(found: Any, lengths: np.ndarray) -> np.ndarray | None:
    """Return [M] float64, with M the sum of `lengths`; None if there is not one number, or one array [T_i], for each sample.

    [0.5, -0.5] with the lengths [2, 1], for example, becomes [0.5, 0.5, -0.5].
    """
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
