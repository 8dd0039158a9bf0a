"""Turns finished groups into the batch that the trainer sees, and into the metrics that people see. Numpy only; called by the controller.

Every denominator is put into `loss_weights` here, over the whole batch, so the loss does not depend on how sequences are later spread over
ranks and micro-batches, or on rows that are dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from offbeat.algorithms.coefficients import KL_METRIC
from offbeat.algorithms.credit import outcome_advantages, rewards_to_go, whitened_sequences, whitened_tokens
from offbeat.algorithms.critic import with_values
from offbeat.algorithms.objectives import CROSS_ENTROPY, policy_loss
from offbeat.algorithms.own_credit import own_advantages, sample_groups
from offbeat.algorithms.shaping import shaped_rewards
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.batch import Batch, bounds, gather_ranges
from offbeat.data.trajectory import Group, Trajectory
from offbeat.errors import DataError, printable
from offbeat.telemetry.tracker import StatsPart, StatsTracker, combine
from offbeat.types import PROMPT_VERSION, Version

_MAX_LOG_RATIO = 20.0
_LONGEST_NAME = 60


def make_batch(groups: Sequence[Group], *, config: AlgorithmConfig, max_new_tokens: int) -> Batch:
    """Flatten groups into a batch with the advantages and loss weights that `config` asks for.

    An unusable trajectory (see `Trajectory.unusable`) counts neither in its group's baseline nor in a denominator. Sequences without loss
    tokens, among them truncated ones with `config.mask_truncated`, and with `config.drop_zero_advantage` those of advantage 0, are left out
    but count as sequences, in their group's baseline and in the denominators.

    Args:
        groups: rejected groups are empty and contribute nothing.
        max_new_tokens: denominator per sequence of `loss_aggregation = "fixed_length"`.

    Returns:
        A batch whose `group_ids` are positions in `groups`. If all prompts of a group are equal, `prefix_lens` is their length. With N
        usable trajectories of n_i loss tokens, in P prompts of n_g, a token of trajectory i weighs 1 / sum(n) (token_mean), 1 / (N n_i)
        (sequence_mean), 1 / N (sequence_sum), 1 / (N max_new_tokens) (fixed_length) or 1 / (P n_g) (prompt_mean). With
        `config.reward_kl`, the advantages are those before it, and with a critic they are the rewards; `with_scores` completes them.

    Raises:
        DataError: a trajectory begins with a generated token, so that nothing predicts it; or a reward is negative where none may be.
        OwnCodeError: the function that `config.credit` names failed.
    """
    members = [group.usable for group in groups]
    for group, usable in zip(groups, members, strict=True):
        if any(t.loss_mask[:1].any() for t in usable):
            raise DataError(f"a trajectory of prompt {group.prompt_id} begins with a generated token; a prompt needs at least one token")
    trajectories, sizes = [t for usable in members for t in usable], [len(usable) for usable in members]
    group_ids = np.repeat(np.arange(len(groups)), sizes)
    num_generated = np.array([t.loss_mask.sum() for t in trajectories], dtype=np.int64)
    truncated = np.array([t.reason == "length" for t in trajectories], dtype=np.bool_)
    num_trained = np.where(truncated, 0, num_generated) if config.mask_truncated else num_generated
    names, given_KN = _rewards(trajectories)
    rewards_KN = shaped_rewards(
        given_KN, group_ids=group_ids, num_generated=num_generated, config=config, max_new_tokens=max_new_tokens)
    offsets = bounds(num_trained)
    if config.credit and trajectories:
        samples = sample_groups(
            trajectories, rewards_KN[0], named_rewards=dict(zip(names, given_KN, strict=True)), group_ids=group_ids, lengths=num_trained)
        advantages = own_advantages(config.credit, samples, config.constants)
    else:
        advantages = _token_advantages(_outcomes(rewards_KN, group_ids, num_trained, config), offsets, config)
    advantages = advantages.astype(np.float32)
    keep = num_trained > 0
    if config.drop_zero_advantage or config.objective == "cross_entropy":  # which imitates whatever it is given
        keep &= np.bincount(np.repeat(np.arange(len(trajectories)), num_trained), advantages != 0, minlength=len(trajectories)) > 0
    kept = np.flatnonzero(keep)
    lengths = [len(trajectories[i]) for i in kept]
    trained = _concatenate([trajectories[i].loss_mask for i in kept], np.bool_)
    advantage_column = np.zeros(len(trained), np.float32)
    advantage_column[trained] = advantages[gather_ranges(offsets, kept)]
    weights, denominator = _token_weights(num_trained, group_ids, config.loss_aggregation, max_new_tokens)
    prefix_lens = np.repeat([_shared_prompt_len(usable) for usable in members], sizes)
    batch = Batch.of_next_tokens(
        _concatenate([trajectories[i].tokens for i in kept], np.int32), trained, lengths=lengths, columns={
            "rollout_logprobs": _concatenate([trajectories[i].rollout_logprobs for i in kept], np.float32),
            "advantages": advantage_column, "loss_weights": np.repeat(weights[kept], lengths)},
        losses=(policy_loss(config),), group_ids=group_ids[kept], prefix_lens=prefix_lens[kept], denominator=denominator)
    if config.needs_critic:
        batch = replace(batch, sequences=batch.sequences | {"truncated": truncated[kept].astype(np.int64)})
    if config.imitation_coefficient:
        right = np.nansum(rewards_KN, axis=0)[kept] > config.imitate_above
        batch = batch.with_columns(imitate_mask=right[batch.target_sequences].astype(np.float32))
    return batch


def with_scores(batch: Batch, scores: Mapping[str, np.ndarray], config: AlgorithmConfig) -> Batch:
    """Return a batch of `make_batch` with what follows from the scores of its targets.

    Where the loss or `config.kl_target` reads it, that is the column `ref_logprobs`. With `config.reward_kl` = beta, the reward of a target
    is -beta * (rollout_logprobs - ref_logprobs), and at the last one of a sequence also the sequence's advantage; a target's advantage is
    the discounted sum of the rewards from there on, whitened if `config` says so.

    With a critic, `critic.with_values` makes advantages of these rewards instead.

    Args:
        scores: by name, as far as `config` needs them: `ref_logprobs` [M] float32, under the reference policy, whose differences from
            `rollout_logprobs` are limited to 20; `values` [M] float32, and `end_values` [N] float32, what the critic expects after the last
            token of a sequence that was cut off, and 0 for others.
    """
    penalties = np.zeros(batch.num_targets)
    if config.compares_reference:
        ref_logprobs = scores["ref_logprobs"]
        if config.loss_reads_reference or config.kl_target:
            batch = batch.with_columns(ref_logprobs=ref_logprobs)
        log_ratios = np.clip(batch.columns["rollout_logprobs"].astype(np.float64) - ref_logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        penalties = -config.reward_kl * log_ratios
    if not (config.reward_kl or config.needs_critic):
        return batch
    offsets = batch.target_offsets
    outcomes, some = np.zeros(len(batch)), np.diff(offsets) > 0
    outcomes[some] = batch.columns["advantages"][offsets[1:][some] - 1]
    if config.needs_critic:
        return with_values(batch, outcomes, penalties, values=scores["values"], end_values=scores["end_values"], config=config)
    return batch.with_columns(advantages=_spread(outcomes, offsets, config, extra=penalties).astype(np.float32))


def reference_stats(batch: Batch) -> StatsPart:
    """Collect the divergence that `kl_target` steers by, which adds up over the processes that drew a part of the batch.

    Args:
        batch: has the column `ref_logprobs`. Differences from `rollout_logprobs` are limited to 20; targets of which one is not finite are
            left out.
    """
    gaps = batch.columns["rollout_logprobs"].astype(np.float64) - batch.columns["ref_logprobs"]
    tracker = StatsTracker()
    tracker.stat({KL_METRIC: np.clip(gaps[np.isfinite(gaps)], -_MAX_LOG_RATIO, _MAX_LOG_RATIO)})
    return tracker.take()


def sft_batch(sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> Batch:
    """Make a batch whose loss is the mean negative log-likelihood over all tokens in the loss masks.

    Args:
        sequences: pairs of tokens [L] int32 and loss_mask [L] bool, as `sft_sequence` returns them.

    Returns:
        A batch of cross-entropy, whose weights average over all of its targets; no prompt is shared.
    """
    trained = _concatenate([mask for _, mask in sequences], np.bool_)
    num_targets = int(trained.sum())
    return Batch.of_next_tokens(
        _concatenate([tokens for tokens, _ in sequences], np.int32), trained, lengths=[len(tokens) for tokens, _ in sequences],
        columns={"loss_weights": trained / max(num_targets, 1)}, losses=(CROSS_ENTROPY,), denominator=float(num_targets))


def split_minibatches(batch: Batch, num_minibatches: int, *, seed: int) -> list[Batch]:
    """Deal the groups of a batch at random into minibatches, one for each optimizer step; groups stay whole.

    Loss weights do not change: the losses of the minibatches add up to the loss of the batch. The trainer scales each step by their number.

    Returns:
        `num_minibatches` batches, fewer if there are fewer groups; their numbers of groups differ by at most 1.
    """
    groups = np.unique(batch.group_ids)
    count = max(min(num_minibatches, len(groups)), 1)
    order = np.random.default_rng(seed).permutation(groups)
    return [batch.select(np.flatnonzero(np.isin(batch.group_ids, order[i::count]))) for i in range(count)]


def batch_stats(groups: Sequence[Group], *, version: Version, separate_rewards: bool = False) -> StatsPart:
    """Collect statistics of a batch of groups, which add up over the processes that drew one; `batch_metrics` finishes them.

    Args:
        version: version of the step that trains on it; staleness is its distance to the oldest token of each trajectory.
        separate_rewards: whether a group has an advantage of 0 only if each of its named rewards is the same for all, not just their sum.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = np.array([t.reward for t in trajectories if t.unusable is None], dtype=np.float64)
    num_generated = np.array([t.loss_mask.sum() for t in trajectories], dtype=np.float64)
    lengths = np.array([t.loss_mask.sum() for t in trajectories if t.unusable is None], dtype=np.float64)
    heads = [t.head_version for t in trajectories if t.unusable is None]
    staleness = np.array([version - head for head in heads if head != PROMPT_VERSION], dtype=np.float64)
    tracker = StatsTracker()
    with tracker.scope("rollout"):
        tracker.stat(reduce="sum", generated_tokens=num_generated)
        tracker.stat(
            response_mean_tokens=num_generated, right_response_mean_tokens=lengths[rewards >= 1],
            wrong_response_mean_tokens=lengths[rewards < 1], truncated_share=np.array([t.reason == "length" for t in trajectories]),
            too_long_share=np.array([t.unusable == "too long" for t in trajectories]), staleness_mean_versions=staleness)
        tracker.stat(reduce="max", staleness_max_versions=staleness)
    with tracker.scope("reward"):
        tracker.stat(
            mean=rewards, mean_square=rewards**2, positive_share=rewards > 0,
            failed_share=np.array([t.unusable == "reward failed" for t in trajectories]),
            zero_advantage_group_share=np.array([g.reward_range(separate=separate_rewards) == 0 for g in groups if g.trajectories]))
        for name, by_group in _named_rewards(groups).items():
            values = np.concatenate(by_group)
            tracker.stat({
                f"{name}_mean": values, f"{name}_mean_square": values**2,
                f"{name}_flat_group_share": np.array([np.ptp(rewards) == 0 for rewards in by_group])})
    return tracker.take()


def batch_metrics(parts: Sequence[StatsPart]) -> dict[str, float]:
    """Compute the metrics of a batch from the `batch_stats` of all processes that drew a part of it.

    Returns:
        Metrics by name. Means and shares are over trajectories, except shares of groups; those of nothing are left out.
    """
    metrics = combine(parts).values()
    for square in [name for name in metrics if name.startswith("reward/") and name.endswith("mean_square")]:
        mean = square.removesuffix("_square")
        metrics[f"{mean.removesuffix('mean')}std"] = max(metrics.pop(square) - metrics[mean] ** 2, 0.0) ** 0.5
    return metrics


def _named_rewards(groups: Sequence[Group]) -> dict[str, list[np.ndarray]]:
    """Return the named rewards of usable trajectories: by name, an array [n] float64 for each group that has some."""
    found: dict[str, list[np.ndarray]] = {}
    for group in groups:
        names = dict.fromkeys(name for t in group.usable for name in t.named_rewards)
        for name in names:
            values = np.array([t.named_rewards[name] for t in group.usable if name in t.named_rewards], dtype=np.float64)
            found.setdefault(printable(name, most=_LONGEST_NAME), []).append(values)
    return found


def _rewards(trajectories: Sequence[Trajectory]) -> tuple[list[str], np.ndarray]:
    """Return K names of rewards, and those rewards of each trajectory, [K, N] float64; NaN where there is none.

    A reward without a name has a row of its own, whose name is "".
    """
    named = [t.named_rewards or {"": t.reward} for t in trajectories]
    names = list(dict.fromkeys(name for rewards in named for name in rewards)) or [""]
    return names, np.array([[rewards.get(name, np.nan) for rewards in named] for name in names], dtype=np.float64)


def _outcomes(rewards_KN: np.ndarray, group_ids: np.ndarray, num_trained: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """Return [N] float64, the advantage of each trajectory as a whole; 1 or 0 if it is to be imitated or not."""
    if config.objective == "cross_entropy":
        return (np.nansum(rewards_KN, axis=0) > config.imitate_above).astype(np.float64)
    outcomes = np.zeros(len(group_ids))
    for rewards in rewards_KN:
        outcomes += outcome_advantages(rewards, group_ids=group_ids, num_tokens=num_trained, centre=config.centre, scale=config.scale)
    if config.whiten == "sequences":
        outcomes = whitened_sequences(outcomes, counted=np.asarray(np.isfinite(rewards_KN).any(axis=0)))
    return outcomes


def _token_advantages(outcomes: np.ndarray, offsets: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """Return [M] float64, the advantages of all trained tokens, without what needs scores."""
    if config.reward_kl or (config.gamma == 1.0 and config.whiten != "tokens"):
        return np.repeat(outcomes, np.diff(offsets))
    return _spread(outcomes, offsets, config)


def _spread(outcomes: np.ndarray, offsets: np.ndarray, config: AlgorithmConfig, extra: np.ndarray | float = 0.0) -> np.ndarray:
    """Return [M] float64, the outcomes and rewards of single tokens as advantages of the tokens before them, whitened if configured.

    Args:
        outcomes: [N] float64, each falls on the last trained token of its trajectory.
        offsets: [N + 1] int64, bounds of the trajectories' trained tokens.
        extra: [M] float64, rewards of single tokens.
    """
    rewards = np.zeros(offsets[-1]) + extra
    some = np.diff(offsets) > 0
    rewards[offsets[1:][some] - 1] += outcomes[some]
    returns = rewards_to_go(rewards, offsets=offsets, gamma=config.gamma)
    return whitened_tokens(returns) if config.whiten == "tokens" else returns


def _token_weights(num_trained: np.ndarray, group_ids: np.ndarray, aggregation: str, max_new_tokens: int) -> tuple[np.ndarray, float]:
    """Return [N] float64, the weight of one trained token of each trajectory, and the denominator that the weights contain."""
    num_sequences = len(num_trained)
    match aggregation:
        case "token_mean":
            denominator, per_unit = float(num_trained.sum()), np.ones(num_sequences)
        case "sequence_mean":
            denominator, per_unit = float(num_sequences), num_trained
        case "sequence_sum":
            denominator, per_unit = float(num_sequences), np.ones(num_sequences)
        case "fixed_length":
            denominator, per_unit = float(num_sequences * max_new_tokens), np.ones(num_sequences)
        case "prompt_mean":
            _, group = np.unique(group_ids, return_inverse=True)
            per_group = np.bincount(group, num_trained)
            denominator, per_unit = float(len(per_group)), per_group[group]
        case _:
            raise AssertionError(f"unknown loss aggregation {aggregation!r}")
    return 1.0 / np.maximum(denominator * per_unit, 1), denominator


def _shared_prompt_len(trajectories: Sequence[Trajectory]) -> int:
    """Return the length of the prompt with which all trajectories begin; 0 if prompts differ. Loss tokens begin after it."""
    lengths = {t.prompt_len for t in trajectories}
    if len(lengths) != 1:
        return 0
    length = lengths.pop()
    same = all(np.array_equal(a.tokens[:length], b.tokens[:length]) for a, b in pairwise(trajectories))
    return length if same else 0


def _concatenate(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
