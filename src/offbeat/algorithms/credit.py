"""Credit: how much better a trajectory, or a token of it, was than could be expected. Numpy in float64; computed in the controller.

A centre (the baseline) and a scale turn rewards into one number per episode, or per turn (`outcome_advantages`); `rewards_to_go` spreads
it, and rewards of single tokens, over the tokens before; `whitened_tokens` and `whitened_sequences` bring the result to mean 0 and
deviation 1 over a whole batch. With a critic, `gae` compares rewards with its values instead. Statistics are over rows with a finite
reward, and count an episode once, even if each of its agents or turns has a row. Called by `experience`; a preset is a choice of these.
"""

import numpy as np

from offbeat.config.algorithms import Centre, Scale
from offbeat.errors import DataError

_EPS = 1e-6
_VARIANCE_EPS = 1e-8


def outcome_advantages(
    rewards: np.ndarray, *, group_ids: np.ndarray, num_tokens: np.ndarray, centre: Centre, scale: Scale, episodes: np.ndarray | None = None,
) -> np.ndarray:
    """Return [N] float64, the advantage of each row: an episode, or the part of an agent or a turn in one.

    With a centre, a group of one episode or of equal rewards is exactly 0. So is a row whose reward is not finite, which counts in no
    statistic. All rows of an episode together weigh as much as those of any other. For example, the rewards [1, 0] of one group are
    [0.5, -0.5] with centre "group", and [1, -1] with "leave_one_out", without a scale.

    Args:
        rewards: [N] float64, one per row.
        group_ids: [N] integers; rows with equal ids form a group. Groups may differ in size.
        num_tokens: [N], number of trained tokens, the weights of `centre = "length_weighted"`.
        centre: "group" subtracts the group's mean; "leave_one_out" the mean of the other episodes; "length_weighted" the mean over tokens;
            "critic" nothing, as a critic's values come later.
        scale: "group_std" divides by the sample standard deviation (over n - 1) + 1e-6 of the group; "batch_std" by that of all rewards;
            "group_mean" by the group's mean, and gives 0 where that is 0.
        episodes: [N] integers; rows with equal ids are of one episode. None is an episode for each.

    Raises:
        DataError: a reward is negative with `scale = "group_mean"`.

    Source: GRPO, arXiv:2402.03300 section 4.1.2 ("group", "group_std"); Dr. GRPO, arXiv:2503.20783 ("group", "none"); RLOO,
    arXiv:2402.14740 ("leave_one_out", "none"); OPO, arXiv:2505.23585 ("length_weighted", "none"); LitePPO, arXiv:2508.08221 ("group",
    "batch_std"); MaxRL, arXiv:2602.02710 ("group", "group_mean").
    """
    found = np.zeros(len(rewards))
    finite = np.isfinite(rewards)
    episodes = np.arange(len(rewards)) if episodes is None else np.asarray(episodes)
    found[finite] = _advantages_of(
        np.asarray(rewards, np.float64)[finite], np.asarray(group_ids)[finite], np.asarray(num_tokens)[finite], episodes[finite], centre,
        scale)
    return found


def _advantages_of(
    rewards: np.ndarray, group_ids: np.ndarray, num_tokens: np.ndarray, episodes: np.ndarray, centre: Centre, scale: Scale,
) -> np.ndarray:
    _, group = np.unique(group_ids, return_inverse=True)
    num_groups = int(group.max(initial=-1)) + 1
    _, episode = np.unique(episodes, return_inverse=True)
    members, member, sizes = np.unique(episode * num_groups + group, return_inverse=True, return_counts=True)
    weights = 1 / sizes[member]
    counts = np.bincount(members % num_groups, minlength=num_groups) if num_groups else members  # episodes of each group
    means = np.bincount(group, weights * rewards, minlength=num_groups) / counts
    from_mean = rewards - means[group]
    # The mean of equal numbers may be rounded to another number; their advantages must be exactly 0 to be dropped.
    lowest, highest = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(lowest, group, rewards)
    np.maximum.at(highest, group, rewards)
    flat = ((lowest == highest) | (counts == 1))[group]
    from_mean[flat] = 0.0
    match centre:
        case "group":
            centred = from_mean
        case "leave_one_out":
            within = np.where(flat, 0.0, rewards - (np.bincount(member, rewards) / sizes)[member])
            centred = within + (from_mean - within) * (counts / np.maximum(counts - 1, 1))[group]
        case "length_weighted":
            tokens = np.bincount(group, num_tokens, minlength=num_groups)
            centred = rewards - (np.bincount(group, num_tokens * rewards, minlength=num_groups) / np.maximum(tokens, 1))[group]
            centred[flat | (tokens == 0)[group]] = 0.0
        case "critic" | "none":
            centred = rewards
    match scale:
        case "none":
            return centred
        case "group_std":
            std = np.sqrt(np.bincount(group, weights * from_mean**2, minlength=num_groups) / np.maximum(counts - 1, 1))
            return centred / (std + _EPS)[group]
        case "batch_std":
            return centred / (_mean_and_std(rewards, episodes)[1] + _EPS)
        case "group_mean":
            if (rewards < 0).any():
                raise DataError(
                    f"rewards must be at least 0 with algorithm.scale = 'group_mean' (the preset max_rl), got {rewards.min():g}; raise"
                    " algorithm.reward_bias, or choose another scale")
            return np.divide(centred, means[group], out=np.zeros_like(centred), where=means[group] > 0)


def rewards_to_go(rewards: np.ndarray, *, offsets: np.ndarray, gamma: float) -> np.ndarray:
    """Return [M] float64, the discounted sum of the rewards of each token and of those after it in its trajectory.

    Args:
        rewards: [M] float64, one per trained token.
        offsets: [N + 1] int64, such as [0, 3, 5]; trajectory i has the tokens from offsets[i] up to offsets[i + 1]. Only these discount.
    """
    return _discounted(rewards, offsets=offsets, factors=np.full(len(offsets) - 1, gamma))


def gae(
    rewards: np.ndarray, values: np.ndarray, *, offsets: np.ndarray, end_values: np.ndarray, gamma: float, lam: np.ndarray | float,
) -> np.ndarray:
    """Return [M] float64, generalised advantage estimates: the discounted sum of each step's surprise and of those after it.

    The surprise of a step is its reward, plus gamma times the value of the next step, less its own value. Adding the values gives returns.

    Args:
        rewards, values: [M] float64, of each step; a value is the expectation before the step.
        offsets: [N + 1] int64; trajectory i has the steps from offsets[i] up to offsets[i + 1]. Tokens between two of them, such as an
            observation, are no step.
        end_values: [N] float64, the value after the last step of each trajectory: 0 where it had come to its end.
        lam: one for all, or [N] float64.

    Source: arXiv:1506.02438.
    """
    following, lengths = np.append(values[1:], 0.0), np.diff(offsets)
    some = lengths > 0
    following[offsets[1:][some] - 1] = end_values[some]
    surprises = rewards + gamma * following - values
    return _discounted(surprises, offsets=offsets, factors=np.broadcast_to(gamma * np.asarray(lam, np.float64), len(lengths)))


def length_lambdas(num_tokens: np.ndarray, *, alpha: float) -> np.ndarray:
    """Return [N] float64, max(0, 1 - 1 / (alpha n)) for n trained tokens, e.g. 0.8 for alpha = 0.05, n = 100 (VAPO, arXiv:2504.05118)."""
    return np.maximum(0.0, 1.0 - 1.0 / (alpha * np.maximum(num_tokens, 1)))


def whitened_tokens(values: np.ndarray) -> np.ndarray:
    """Return [M] float64, (values - mean) / sqrt(variance + 1e-8) over all trained tokens of a batch; 0 if all are equal.

    The variance is over M, as in OpenRLHF. Source: REINFORCE++, arXiv:2501.03262.
    """
    if not len(values) or values.min() == values.max():
        return np.zeros(len(values))
    centred = values - values.mean()
    return centred / np.sqrt(np.mean(centred**2) + _VARIANCE_EPS)


def whitened_sequences(values: np.ndarray, *, counted: np.ndarray, episodes: np.ndarray | None = None) -> np.ndarray:
    """Return [N] float64, (values - mean) / (std + 1e-6) over the counted rows of a batch; 0 for others, and if all are equal.

    Args:
        counted: [N] bool, those that have a reward.
        episodes: [N] integers, the episode of each row, which counts once; None is one for each.

    Source: GDPO, arXiv:2601.05242.
    """
    own = values[counted]
    if not len(own) or own.min() == own.max():
        return np.zeros(len(values))
    mean, std = _mean_and_std(own, np.arange(len(own)) if episodes is None else episodes[counted])
    return np.where(counted, (values - mean) / (std + _EPS), 0.0)


def _discounted(values: np.ndarray, *, offsets: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return [M] float64: each value plus its trajectory's factor [N] times the result of the value after it."""
    sums, running = np.empty(len(values)), np.zeros(len(offsets) - 1)
    lengths = np.diff(offsets)
    for back in range(1, int(lengths.max(initial=0)) + 1):  # the last steps of all trajectories, then those before
        live = np.flatnonzero(lengths >= back)
        steps = offsets[1:][live] - back
        running[live] = values[steps] + factors[live] * running[live]
        sums[steps] = running[live]
    return sums


def _mean_and_std(values: np.ndarray, episodes: np.ndarray) -> tuple[float, float]:
    """Return mean and deviation (over n - 1; 0 for n < 2 or equal values) of n episodes, from values and their episodes, [N] each."""
    _, episode, sizes = np.unique(episodes, return_inverse=True, return_counts=True)
    weights = 1 / sizes[episode]
    mean = float((weights * values).sum() / max(len(sizes), 1))
    if len(sizes) < 2 or values.min() == values.max():
        return mean, 0.0
    return mean, float(np.sqrt((weights * (values - mean)**2).sum() / (len(sizes) - 1)))
