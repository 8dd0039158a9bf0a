"""Advantages of a batch from a critic's values, and the batch that the critic learns from. Numpy only; called around the score step.

A value is the critic's estimate of the rest of an episode before a token is generated: the output of the value model at the position that
predicts the token. Only generated tokens are steps; tokens between them, such as a tool's output, are skipped.
"""

from dataclasses import replace

import numpy as np

from offbeat.algorithms.credit import gae, length_lambdas, whitened_tokens
from offbeat.algorithms.objectives import value_loss
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.batch import Batch


def with_end_targets(batch: Batch) -> tuple[Batch, np.ndarray]:
    """Add a target after the last token of each sequence that was cut off, for the critic's value there.

    The batch has the sequence column `truncated`, [N] int64, such as [0, 1]. Returned are the batch with `loss_weights` as its only column,
    and a mask of the targets that were added, [M + number of truncated] bool.
    """
    cut_off = np.flatnonzero(batch.sequences["truncated"])
    positions = np.concatenate([batch.positions, batch.offsets[cut_off + 1] - 1])
    order = np.argsort(positions, kind="stable")
    added = order >= batch.num_targets
    targets = np.concatenate([batch.targets, np.zeros(len(cut_off), np.int32)])[order]
    return replace(
        batch, positions=positions[order], targets=targets, columns={"loss_weights": (~added).astype(np.float32)},
        losses=(value_loss(0.0),)), added


def with_values(batch: Batch, penalties: np.ndarray, *, values: np.ndarray, end_values: np.ndarray, config: AlgorithmConfig) -> Batch:
    """Return the batch with advantages over the critic's values, and with the columns `values` and `returns` for `critic_batch`.

    Advantages are generalised advantage estimates; returns are those of `critic_lambda` plus the values, before any whitening. With
    `config.turn_level` a turn is one step: it has the rewards that fall into it and the value of its first token, and its tokens share its
    advantage and return. Penalties, [M] float64 of single tokens, are then taken from their own tokens' advantages, and are in no return.

    Args:
        batch: its `advantages` are the rewards of single tokens: a turn's at its end, and the outcome at the end of the sequence.
        values: [M] float32, before each target.
        end_values: [N] float32, after the last token of a sequence that was cut off, and 0 for others.
    """
    offsets = batch.target_offsets
    rewards = batch.columns["advantages"].astype(np.float64)
    if not config.turn_level:
        rewards += penalties
    starts = _turn_starts(batch) if config.turn_level else np.arange(batch.num_targets)
    steps = np.searchsorted(starts, offsets)
    num_tokens = np.diff(np.append(starts, batch.num_targets))
    of_steps = values[starts].astype(np.float64)
    rewards_of_steps = np.add.reduceat(rewards, starts) if len(starts) else rewards

    def estimates(lam: np.ndarray | float) -> np.ndarray:
        return gae(rewards_of_steps, of_steps, offsets=steps, end_values=end_values.astype(np.float64), gamma=config.gamma, lam=lam)

    lam = length_lambdas(np.diff(steps), alpha=config.gae_length_alpha) if config.gae_length_alpha else config.gae_lambda
    advantages = np.repeat(estimates(lam), num_tokens)
    if config.turn_level:
        advantages = advantages + penalties
    if config.whiten == "tokens":
        advantages = whitened_tokens(advantages)
    returns = np.repeat(estimates(config.critic_lambda) + of_steps, num_tokens)
    return batch.with_columns(advantages=advantages.astype(np.float32), values=values, returns=returns.astype(np.float32))


def critic_batch(batch: Batch, *, value_clip: float) -> Batch:
    """Return the critic's batch, from one of `with_values`; its loss is the mean over all targets."""
    weights = np.full(batch.num_targets, 1 / max(batch.num_targets, 1), np.float32)
    return replace(
        batch, columns={"loss_weights": weights, "values": batch.columns["values"], "returns": batch.columns["returns"]},
        losses=(value_loss(value_clip),), denominator=float(batch.num_targets))


def _turn_starts(batch: Batch) -> np.ndarray:
    """Return [K] int64, the first target of each turn: the first of a sequence, or one that does not follow the target before it.

    Targets of one sequence at the positions [3, 4, 9], for example, give [0, 2].
    """
    begins = np.diff(batch.positions, prepend=-2) != 1
    begins |= np.diff(batch.target_sequences, prepend=-1) != 0
    return np.flatnonzero(begins)
