"""Choices that compare all targets of a batch with each other, made once over the whole batch, before its first update.

Called by the controller with the log-probabilities of the score step, so that neither ranks nor micro-batches nor minibatches change which
targets are chosen. Numpy in float64. All other filters are in `losses.weights`.

Source: M2PO, arXiv:2510.01161; Clip-Cov and KL-Cov, arXiv:2505.22617.
"""

import numpy as np

from offbeat.data.batch import Batch, FilterSpec, LossSpec

_MAX_LOG_RATIO = 20.0  # as in `losses.ratios`


def choose_tokens(loss: LossSpec, batch: Batch, *, prox_logprobs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Choose among all M targets of a batch, whose targets of loss weight 0 are not counted and never chosen.

    With lp = prox_logprobs and A the advantage, over the n targets that count:

        m2_mask      With x = lp - rollout_logprobs, a target is harmful if an update would move it further from the policy that sampled:
                     A > 0 and x > 0, or A < 0 and x < 0. Those with the largest x^2 are dropped, equal ones together, until the mean x^2 of
                     the harmful ones that remain is at most `high`. `rollout_logprobs` that are not finite count as a ratio of exp(20).
        detach_mask  Clip-Cov: with cov = (A - mean A)(lp - mean lp), max(1, floor(share n)) targets are dropped at random, or all, of those
                     with low < cov < high that ppo does not clip already.
        kl_cov_mask  KL-Cov: the max(1, floor(share n)) targets of the largest cov are chosen, the first of equal ones.

    Args:
        prox_logprobs: [M], under the weights before the first update. A target whose own is not finite has no covariance.
        seed: of the targets that Clip-Cov draws.

    Returns:
        [M] float32 each, the columns that the loss reads of these. In the first two, 1 is to keep and 0 to drop; in the last, 1 is chosen.
    """
    prox = np.asarray(prox_logprobs, np.float64)
    counted = batch.columns["loss_weights"] != 0
    chosen: dict[str, np.ndarray] = {}
    if any(rule.metric == "m2" for rule in loss.filters):
        chosen["m2_mask"] = _m2_kept(loss, batch, prox, counted)
    for rule in loss.filters:
        if rule.metric == "clip_cov":
            chosen["detach_mask"] = ~_clip_cov(loss, rule, batch, prox, counted, np.random.default_rng(seed))
    for term in loss.regularisers:
        if term.kind == "kl_cov":
            chosen["kl_cov_mask"] = _kl_cov(term.share, covariances(prox, batch.columns["advantages"], counted), counted)
    return {name: mask.astype(np.float32) for name, mask in chosen.items()}


def covariances(logprobs: np.ndarray, advantages: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Return [M] float64, (A - mean A)(lp - mean lp) over targets that are `counted` [M] bool with finite lp; else minus infinity."""
    known = counted & np.isfinite(logprobs)
    found = np.full(len(logprobs), -np.inf)
    if known.any():
        lp, a = np.asarray(logprobs, np.float64)[known], np.asarray(advantages, np.float64)[known]
        found[known] = (a - a.mean()) * (lp - lp.mean())
    return found


def _clip_cov(
    loss: LossSpec, rule: FilterSpec, batch: Batch, prox: np.ndarray, counted: np.ndarray, rng: np.random.Generator,
) -> np.ndarray:
    """Return [M] bool, the targets to be detached."""
    values = covariances(prox, batch.columns["advantages"], counted)
    eligible = np.flatnonzero((values > rule.low) & (values < rule.high) & ~_is_clipped(loss, batch, prox))
    drawn = rng.permutation(eligible)[:max(1, int(rule.share * counted.sum()))]
    return np.isin(np.arange(len(prox)), drawn)


def _is_clipped(loss: LossSpec, batch: Batch, prox: np.ndarray) -> np.ndarray:
    """Return [M] bool, the targets that ppo's clip leaves without gradient before the first update; none where the anchor is proximal."""
    if loss.anchor == "prox":
        return np.zeros(len(prox), np.bool_)
    low, high = (float(loss.constants[name]) for name in ("clip_low", "clip_high"))
    ratios = np.exp(np.clip(np.nan_to_num(prox - batch.columns["rollout_logprobs"], nan=0.0), -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    advantages = batch.columns["advantages"]
    return ((advantages > 0) & (ratios > high)) | ((advantages < 0) & (ratios < low))


def _kl_cov(share: float, values: np.ndarray, counted: np.ndarray) -> np.ndarray:
    order = np.argsort(-values, kind="stable")[:max(1, int(share * counted.sum()))]
    return np.isin(np.arange(len(values)), order) & np.isfinite(values)


def _m2_kept(loss: LossSpec, batch: Batch, prox: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Return [M] bool, the targets that all M2PO filters of a loss keep."""
    rollout, advantages = (np.asarray(batch.columns[name], np.float64) for name in ("rollout_logprobs", "advantages"))
    with np.errstate(invalid="ignore"):
        gaps = np.where(np.isfinite(rollout), np.nan_to_num(prox - rollout, nan=0.0), _MAX_LOG_RATIO)
    gaps = np.clip(gaps, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    harmful = (np.sign(gaps) == np.sign(advantages)) & (gaps != 0) & counted
    squares = gaps**2
    keep = np.ones(len(gaps), np.bool_)
    for rule in loss.filters:
        if rule.metric == "m2":
            keep &= ~harmful | (squares < _first_dropped(np.sort(squares[harmful]), rule.high))
    return keep


def _first_dropped(squares: np.ndarray, limit: float) -> float:
    """Return the smallest of ascending squares [K] to drop, so that the mean of the smaller ones is at most `limit`; infinity if none.

    With a limit of 2, for example, it is 6 of [1, 2, 6], whose mean would be 3.
    """
    means = np.cumsum(squares) / np.arange(1, len(squares) + 1)
    above = np.flatnonzero(means > limit)  # means of ascending numbers ascend
    return float(squares[above[0]]) if len(above) else np.inf
