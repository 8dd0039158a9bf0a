"""Filters that compare all targets of a batch with each other, computed once over the whole batch, before its first update.

Called by the controller with the log-probabilities of the score step, so that neither ranks nor micro-batches nor minibatches change which
targets are kept. Numpy only. All other filters are in `losses.weights`.
"""

import numpy as np

from offbeat.data.batch import Batch, LossSpec

_MAX_LOG_RATIO = 20.0  # as in `losses.ratios`


def choose_tokens(loss: LossSpec, batch: Batch, *, prox_logprobs: np.ndarray) -> np.ndarray:
    """Choose the targets that the M2PO filters of a loss keep, among all M targets of a batch.

    With x = prox_logprobs - rollout_logprobs, a target is harmful if an update would move it further from the policy that sampled:
    A > 0 and x > 0, or A < 0 and x < 0. Those with the largest x^2 are dropped, equal ones together, until the mean x^2 of the harmful
    ones that remain is at most `high`. A rollout log-probability that is not finite counts as a ratio of exp(20).

    Args:
        batch: the whole batch, whose targets of weight 0 are not counted.
        prox_logprobs: [M], under the weights before the first update.

    Returns:
        [M] float32, the column `m2_mask`: 1 to keep, 0 to drop.

    Source: M2PO, arXiv:2510.01161.
    """
    prox, rollout, advantages = (
        np.asarray(values, np.float64) for values in (prox_logprobs, batch.columns["rollout_logprobs"], batch.columns["advantages"]))
    with np.errstate(invalid="ignore"):
        gaps = np.where(np.isfinite(rollout), np.nan_to_num(prox - rollout, nan=0.0), _MAX_LOG_RATIO)
    gaps = np.clip(gaps, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    harmful = (np.sign(gaps) == np.sign(advantages)) & (gaps != 0) & (batch.columns["loss_weights"] != 0)
    squares = gaps**2
    keep = np.ones(len(gaps), np.bool_)
    for rule in loss.filters:
        if rule.metric == "m2":
            keep &= ~harmful | (squares < _first_dropped(np.sort(squares[harmful]), rule.high))
    return keep.astype(np.float32)


def _first_dropped(squares: np.ndarray, limit: float) -> float:
    """Return the smallest of ascending numbers [n] that must go for the mean of the smaller ones to be at most `limit`, or infinity."""
    means = np.cumsum(squares) / np.arange(1, len(squares) + 1)
    above = np.flatnonzero(means > limit)  # means of ascending numbers ascend
    return float(squares[above[0]]) if len(above) else np.inf
