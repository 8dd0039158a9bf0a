"""Turns finished groups into the batch that the trainer gets, and into metrics. Numpy only; called by the controller.

Every denominator is put into `loss_weights` here, over the whole batch, so the loss does not depend on how sequences are later spread over
ranks and micro-batches, or on rows that are dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from offbeat.algorithms.coefficients import KL_METRIC
from offbeat.algorithms.credit import outcome_advantages, rewards_to_go, whitened_sequences, whitened_tokens
from offbeat.algorithms.critic import with_values
from offbeat.algorithms.episodes import Episodes, Turns, last_tokens
from offbeat.algorithms.objectives import CROSS_ENTROPY, policy_loss
from offbeat.algorithms.own_credit import own_advantages, sample_groups
from offbeat.algorithms.preference import answer_batch
from offbeat.algorithms.shaping import shaped_rewards
from offbeat.algorithms.turns import reward_range, turn_advantages
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.objectives import objective_of
from offbeat.data.batch import Batch, SharedPrompts
from offbeat.data.expert_routes import join_routes
from offbeat.data.ranges import any_in_ranges, bounds, over_ranges, take_ranges
from offbeat.data.reward import RIGHT
from offbeat.data.sample_supports import join_supports
from offbeat.data.trajectory import Group, Trajectory, mean_reward
from offbeat.errors import DataError, printable
from offbeat.telemetry.tracker import StatsPart, StatsTracker, combine
from offbeat.types import PROMPT_VERSION, Version

_MAX_LOG_RATIO = 20.0
_LONGEST_NAME = 60
_PLAIN = AlgorithmConfig()
_SINGLE_TURN = {"rollout/turns_mean": 1.0, "rollout/chains_mean": 1.0, "rollout/malformed_call_share": 0.0}
"""Metrics of agents, each with its largest value where there are none."""


def make_batch(groups: Sequence[Group], *, config: AlgorithmConfig, max_new_tokens: int) -> Batch:
    """Flatten groups into a batch with the advantages and loss weights of `config`.

    An episode with an unusable trajectory (see `Trajectory.unusable`) counts neither in its group's baseline nor in a denominator. Two
    kinds of sequences are left out but count in their group's baseline and in the denominators: those without loss tokens, such as
    truncated ones with `config.mask_truncated`, and with `config.drop_zero_advantage` those of advantage 0.

    Args:
        groups: rejected groups are empty and contribute nothing.
        max_new_tokens: denominator per episode of `loss_aggregation = "fixed_length"`.

    Returns:
        A batch whose `group_ids` are positions in `groups`. If all prompts of a group are equal, `prefix_lens` is their length. With E
        usable episodes of n_e loss tokens, in all their trajectories, in P prompts of n_g, a token of episode e weighs 1 / sum(n)
        (token_mean), 1 / (E n_e) (sequence_mean), 1 / E (sequence_sum), 1 / (E max_new_tokens) (fixed_length) or 1 / (P n_g) (prompt_mean).
        For example, with two episodes of 3 and 1 tokens and token_mean, each token weighs 1 / 4. With `config.reward_kl`, the advantages
        lack its penalty, and with a critic they are the rewards of single tokens; `with_scores` completes them.

    Raises:
        DataError: a trajectory begins with a generated token, which nothing predicts; or a reward is negative where none may be.
        OwnCodeError: the function that `config.credit` names failed.
    """
    episodes = Episodes.of(groups)
    trajectories, group_ids, part_ids = episodes.trajectories, episodes.group_ids, episodes.part_ids
    for position, t in zip(group_ids, trajectories, strict=True):
        if len(t) and t.loss_mask[0]:
            raise DataError(
                f"a trajectory of prompt {groups[position].prompt_id} begins with a generated token; a prompt needs at least one token")
    num_generated = np.array([t.num_generated for t in trajectories], dtype=np.int64)
    truncated = np.array([t.reason == "length" for t in trajectories], dtype=np.bool_)
    num_trained = np.where(episodes.cut_off(), 0, num_generated) if config.mask_truncated else num_generated
    compared = episodes.compared(by_agent=config.agent_baselines)
    lengths_of_parts = episodes.of_parts(num_generated)
    rewards_KU = shaped_rewards(
        episodes.rewards, group_ids=compared, num_generated=lengths_of_parts,
        longest_answers=episodes.longest_answers() if config.overlong_buffer_share else lengths_of_parts,
        num_malformed=episodes.of_parts(np.array([t.malformed_calls for t in trajectories])), config=config, max_new_tokens=max_new_tokens)
    offsets = bounds(num_trained)
    if config.credit and trajectories:
        advantages = own_advantages(config.credit, sample_groups(episodes, rewards_KU[0], lengths=num_trained), config.constants)
    elif config.needs_critic:
        advantages = _token_rewards(episodes, rewards_KU[0], offsets, config)
    else:
        outcomes = _outcomes(rewards_KU, compared, episodes, episodes.of_parts(num_trained), config)
        if config.turn_credit == "episode":
            advantages = _token_advantages(outcomes[part_ids], offsets, config)
        else:
            turns = Turns.of(episodes, num_trained)
            advantages = turn_advantages(turns, episodes, rewards=rewards_KU[0], advantages=outcomes, config=config)[turns.of_tokens]
            advantages = whitened_tokens(advantages) if config.whiten == "tokens" else advantages
    advantages = advantages.astype(np.float32, copy=False)
    keep = num_trained > 0
    if config.drop_zero_advantage or objective_of(config.objective).imitates:  # which imitates every sequence of its batch
        keep &= any_in_ranges(advantages != 0, offsets)
    kept = np.flatnonzero(keep)
    weights, denominator = _token_weights(num_trained, group_ids, episodes.episode_ids, config.loss_aggregation, max_new_tokens)
    prefix_lens = np.array([_shared_prompt_len(group.usable) for group in groups], np.int64)[group_ids]
    used = [trajectories[i] for i in kept]
    batch = Batch.of_sequences(
        [t.tokens for t in used], [t.loss_mask for t in used], columns={
            "advantages": advantages if keep.all() else take_ranges(advantages, offsets, kept),
            "loss_weights": over_ranges(weights[kept].astype(np.float32), bounds(num_trained[kept]))},
        of_tokens={"rollout_logprobs": [t.rollout_logprobs for t in used]}, losses=(policy_loss(config),),
        shared=SharedPrompts(group_ids[kept], prefix_lens[kept]), denominator=denominator)
    supports = [None if t.supports is None else t.supports.at_indices(np.flatnonzero(t.loss_mask)) for t in used]
    batch = replace(
        batch, routes=join_routes([t.routes for t in used], [len(t) for t in used]),
        supports=join_supports(supports, num_trained[kept].tolist()))
    if config.needs_critic:
        batch = replace(batch, sequences=batch.sequences | {"truncated": truncated[kept].astype(np.int64)})
    if config.imitation_coefficient:
        right = (np.nansum(rewards_KU, axis=0) > config.imitate_above)[part_ids][kept]
        batch = batch.with_columns(imitate_mask=right[batch.target_sequences].astype(np.float32))
    return batch


def with_scores(batch: Batch, scores: Mapping[str, np.ndarray], config: AlgorithmConfig) -> Batch:
    """Complete a batch of `make_batch` with the scores of its targets.

    The batch gets the column `ref_logprobs` where the loss or `config.kl_target` reads it. With `config.reward_kl` = beta, the reward of a
    target is -beta * (rollout_logprobs - ref_logprobs), and at the last one of a sequence also the sequence's advantage; a target's
    advantage is the discounted sum of the rewards from there on, whitened if `config` says so. With a critic, `critic.with_values` makes
    advantages of the rewards of tokens instead.

    Scores are, as far as `config` needs them, `ref_logprobs` [M] float32, under the reference policy, whose differences from
    `rollout_logprobs` are limited to 20; `values` [M] float32, and `end_values` [N] float32, the critic's value after the last token of a
    sequence that was cut off, and 0 for others.
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
    if config.needs_critic:
        return with_values(batch, penalties, values=scores["values"], end_values=scores["end_values"], config=config)
    offsets = batch.target_offsets
    outcomes, some = np.zeros(len(batch)), np.diff(offsets) > 0
    outcomes[some] = batch.columns["advantages"][offsets[1:][some] - 1]
    return batch.with_columns(advantages=_spread(outcomes, offsets, config, extra=penalties).astype(np.float32))


def reference_stats(batch: Batch) -> StatsPart:
    """Collect the divergence that `kl_target` steers by, which adds up over the processes that drew a part of the batch.

    Differences of the columns `rollout_logprobs` and `ref_logprobs` are limited to 20; targets of which one is not finite are left out.
    """
    gaps = batch.columns["rollout_logprobs"].astype(np.float64) - batch.columns["ref_logprobs"]
    tracker = StatsTracker()
    tracker.stat({KL_METRIC: np.clip(gaps[np.isfinite(gaps)], -_MAX_LOG_RATIO, _MAX_LOG_RATIO)})
    return tracker.take()


def sft_batch(sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> Batch:
    """Make a batch whose loss is the mean negative log-likelihood over all tokens in the loss masks; no prompt is shared.

    `sequences` are pairs of tokens [L] int32 and loss_mask [L] bool, as `sft_sequence` returns them.
    """
    batch = answer_batch(sequences, CROSS_ENTROPY)
    weights = np.full(batch.num_targets, 1 / max(batch.num_targets, 1))
    return replace(batch.with_columns(loss_weights=weights), denominator=float(batch.num_targets))



def split_minibatches(batch: Batch, num_minibatches: int, *, seed: int) -> list[Batch]:
    """Deal the groups of a batch at random into minibatches, one for each optimizer step; groups stay whole.

    Loss weights do not change: the losses of the minibatches add up to the loss of the batch. The trainer scales each step by their number.
    There are fewer than `num_minibatches` if there are fewer groups; their numbers of groups differ by at most 1.
    """
    groups = np.unique(batch.group_ids)
    count = max(min(num_minibatches, len(groups)), 1)
    order = np.random.default_rng(seed).permutation(groups)
    if count == 1:
        return [batch]
    return [batch.select(np.flatnonzero(np.isin(batch.group_ids, order[i::count]))) for i in range(count)]


def batch_stats(groups: Sequence[Group], *, version: Version, config: AlgorithmConfig = _PLAIN) -> StatsPart:
    """Collect statistics of a batch of groups, which add up over the processes that drew one; `batch_metrics` finishes them.

    Args:
        version: version of the step that trains on it; staleness is its distance to the oldest token of each episode.
        config: decides which values credit compares; a group of advantage 0 has equal ones (see `turns.reward_range`).
    """
    everyone = [(chains, verdict.unusable) for group in groups for chains, verdict in zip(group.episodes, group.verdicts, strict=True)]
    rewards = np.array([mean_reward(parts) for group in groups for parts in group.usable_parts], dtype=np.float64)
    num_generated = np.array([sum(t.num_generated for t in chains) for chains, _ in everyone], dtype=np.float64)
    usable = np.array([why is None for _, why in everyone], np.bool_)
    lengths = num_generated[usable]
    heads = [[t.head_version for t in chains if t.head_version != PROMPT_VERSION] for chains, why in everyone if why is None]
    staleness = np.array([version - min(of_chains) for of_chains in heads if of_chains], dtype=np.float64)
    tracker = StatsTracker()
    with tracker.scope("rollout"):
        tracker.stat(reduce="sum", generated_tokens=num_generated)
        tracker.stat(
            response_mean_tokens=num_generated, right_response_mean_tokens=lengths[rewards >= RIGHT],
            wrong_response_mean_tokens=lengths[rewards < RIGHT],
            truncated_share=np.array([any(t.reason == "length" for t in chains) for chains, _ in everyone]),
            too_long_share=np.array([why == "too long" for _, why in everyone]), staleness_mean_versions=staleness)
        tracker.stat(
            turns_mean=np.array([sum(len(t.calls) for t in chains) for chains, _ in everyone], dtype=np.float64),
            chains_mean=np.array([len(chains) for chains, _ in everyone], dtype=np.float64),
            malformed_call_share=np.array([any(t.malformed_calls for t in chains) for chains, _ in everyone]))
        tracker.stat(reduce="max", staleness_max_versions=staleness)
    with tracker.scope("reward"):
        tracker.stat(
            mean=rewards, mean_square=rewards**2, positive_share=rewards > 0, right_share=rewards >= RIGHT,
            failed_share=np.array([why == "reward failed" for _, why in everyone]),
            zero_advantage_group_share=np.array([reward_range(group, config) == 0 for group in groups if group.trajectories]))
        for name, by_group in _named_rewards(groups).items():
            values = np.concatenate(by_group)
            tracker.stat({
                f"{name}_mean": values, f"{name}_mean_square": values**2,
                f"{name}_flat_group_share": np.array([np.ptp(rewards) == 0 for rewards in by_group])})
    return tracker.take()


def batch_metrics(parts: Sequence[StatsPart]) -> dict[str, float]:
    """Compute the metrics of a batch, such as {"reward/mean": 0.25}, from the `batch_stats` of all processes that drew a part of it.

    Means and shares are over episodes, except shares of groups. Those over no episode are left out, and those of turns, trajectories and
    malformed calls where each episode was a single turn at most.
    """
    metrics = combine(parts).values()
    if all(metrics.get(name, 0.0) <= most for name, most in _SINGLE_TURN.items()):
        metrics = {name: value for name, value in metrics.items() if name not in _SINGLE_TURN}
    for square in [name for name in metrics if name.startswith("reward/") and name.endswith("mean_square")]:
        mean = square.removesuffix("_square")
        metrics[f"{mean.removesuffix('mean')}std"] = max(metrics.pop(square) - metrics[mean] ** 2, 0.0) ** 0.5
    return metrics


def _named_rewards(groups: Sequence[Group]) -> dict[str, list[np.ndarray]]:
    """Return the named rewards of usable episodes, and those of each agent, e.g. "agent_solver".

    By name, a list with [E] float64 for each group that has E such rewards.
    """
    found: dict[str, list[np.ndarray]] = {}
    for group in groups:
        of_group: dict[str, list[float]] = {}
        for part in (part for own in group.usable_parts for part in own):
            by_agent = {f"agent_{part.agent}": part.reward} if part.agent else {}
            for name, reward in {**part.chains[0].named_rewards, **by_agent}.items():
                of_group.setdefault(name, []).append(reward)
        for name, rewards in of_group.items():
            found.setdefault(printable(name, most=_LONGEST_NAME), []).append(np.array(rewards, dtype=np.float64))
    return found


def _outcomes(
    rewards_KU: np.ndarray, compared: np.ndarray, episodes: Episodes, num_tokens: np.ndarray, config: AlgorithmConfig,
) -> np.ndarray:
    """Return [U] float64, the advantage of each part as a whole; with an objective that imitates, 1 to imitate it and 0 not to."""
    if objective_of(config.objective).imitates:
        return (np.nansum(rewards_KU, axis=0) > config.imitate_above).astype(np.float64)
    outcomes = np.zeros(len(compared))
    for rewards in rewards_KU:
        outcomes += outcome_advantages(
            rewards, group_ids=compared, num_tokens=num_tokens, centre=config.centre, scale=config.scale, episodes=episodes.part_episodes)
    if config.whiten == "sequences":
        outcomes = whitened_sequences(outcomes, counted=np.asarray(np.isfinite(rewards_KU).any(axis=0)), episodes=episodes.part_episodes)
    return outcomes


def _token_rewards(episodes: Episodes, rewards: np.ndarray, offsets: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """Return [M] float64, the reward of each trained token: at the end of a turn the turn's, and at the end of a trajectory the outcome.

    The rewards of later turns in other trajectories of the part fall on the end of this one, too: its own turns led to them.

    Args:
        rewards: [U] float64, the shaped reward of each part, rewards of its turns among it.
        offsets: [N + 1] int64, bounds of the trajectories' trained tokens.
    """
    found, some = np.zeros(offsets[-1]), np.diff(offsets) > 0
    outcomes = (rewards - config.reward_scale * episodes.turn_rewards)[episodes.part_ids]
    found[offsets[1:][some] - 1] = outcomes[some]
    for start, t in zip(offsets[:-1][some], (t for t, is_in in zip(episodes.trajectories, some, strict=True) if is_in), strict=True):
        if t.turns:
            np.add.at(found, start + last_tokens(t), config.reward_scale * np.array([turn.reward for turn in t.turns]))
    found[offsets[1:][some] - 1] += config.reward_scale * _earned_elsewhere(episodes)[some]
    return found


def _earned_elsewhere(episodes: Episodes) -> np.ndarray:
    """Return [N] float64, rewards of turns that were played after the last one of a trajectory, in others of its part."""
    earned = np.zeros(len(episodes.trajectories))
    ends = [max((turn.order for turn in t.turns), default=0) for t in episodes.trajectories]
    for part in np.flatnonzero(np.bincount(episodes.part_ids) > 1):
        own = np.flatnonzero(episodes.part_ids == part)
        for index in own:
            earned[index] = sum(
                turn.reward for other in own if other != index for turn in episodes.trajectories[other].turns if turn.order > ends[index])
    return earned


def _token_advantages(outcomes: np.ndarray, offsets: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """Return [M] float64 or float32, the advantages of all trained tokens, without the terms that need scores."""
    if config.reward_kl or (config.gamma == 1.0 and config.whiten != "tokens"):
        return over_ranges(outcomes.astype(np.float32), offsets)
    return _spread(outcomes, offsets, config)


def _spread(outcomes: np.ndarray, offsets: np.ndarray, config: AlgorithmConfig, extra: np.ndarray | float = 0.0) -> np.ndarray:
    """Return [M] float64, the outcomes and rewards of single tokens as advantages of the tokens before them, whitened if configured.

    Args:
        outcomes: [N] float64, rewards of the last trained token of each trajectory.
        offsets: [N + 1] int64, bounds of the trajectories' trained tokens.
        extra: [M] float64, rewards of single tokens.
    """
    rewards = np.zeros(offsets[-1]) + extra
    some = np.diff(offsets) > 0
    rewards[offsets[1:][some] - 1] += outcomes[some]
    returns = rewards_to_go(rewards, offsets=offsets, gamma=config.gamma)
    return whitened_tokens(returns) if config.whiten == "tokens" else returns


def _token_weights(
    num_trained: np.ndarray, group_ids: np.ndarray, episode_ids: np.ndarray, aggregation: str, max_new_tokens: int,
) -> tuple[np.ndarray, float]:
    """Return [N] float64, the weight of one trained token of each trajectory, and the denominator that the weights contain."""
    num_episodes, same = int(episode_ids.max(initial=-1)) + 1, np.ones(len(num_trained))
    match aggregation:
        case "token_mean":
            denominator, per_unit = float(num_trained.sum()), same
        case "sequence_mean":
            denominator, per_unit = float(num_episodes), np.bincount(episode_ids, num_trained)[episode_ids]
        case "sequence_sum":
            denominator, per_unit = float(num_episodes), same
        case "fixed_length":
            denominator, per_unit = float(num_episodes * max_new_tokens), same
        case "prompt_mean":
            _, group = np.unique(group_ids, return_inverse=True)
            per_group = np.bincount(group, num_trained)
            denominator, per_unit = float(len(per_group)), per_group[group]
        case _:
            raise AssertionError(f"unknown loss aggregation {aggregation!r}")
    return 1.0 / np.maximum(denominator * per_unit, 1), denominator


def _shared_prompt_len(trajectories: Sequence[Trajectory]) -> int:
    """Return the length of the trajectories' common prompt; 0 if prompts differ. Loss tokens begin after it."""
    lengths = {t.prompt_len for t in trajectories}
    if len(lengths) != 1:
        return 0
    length = lengths.pop()
    return length if len({t.tokens[:length].tobytes() for t in trajectories}) == 1 else 0
