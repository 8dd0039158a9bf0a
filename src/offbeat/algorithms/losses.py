"""Losses per token. The trainer multiplies them by the batch's loss weights and sums; no denominator is applied here."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.algorithms.ratios import MAX_LOG_RATIO, behave_weights, k3
from offbeat.config.algorithms import AlgorithmConfig


@dataclass(frozen=True, eq=False)
class TokenLosses:
    """Losses of M tokens, and what to report about them.

    Attributes:
        losses: [M] float32 with gradient.
        means: metric name -> [M], values whose mean over all tokens trained on is reported; without gradient.
        maxima: metric name -> [M], values whose maximum is reported; without gradient.
    """

    losses: Tensor
    means: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


def ppo_clip(
    logprobs: Tensor, prox_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, *, config: AlgorithmConfig,
) -> TokenLosses:
    """Decoupled PPO-clip, with an optional bound on tokens of negative advantage.

        r = exp(logprobs - prox_logprobs)
        loss = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A), at most dual_clip * |A| where A < 0
        loss *= behaviour weight, a constant

    Args:
        logprobs: [M] float32, under the current weights; the only input with gradient.
        prox_logprobs: [M] float32, under the weights at the start of the training step.
        rollout_logprobs: [M] float32, under the policy that sampled.
        advantages: [M] float32.

    Returns:
        Losses, and by metric name: `train/clip_fraction` (tokens whose gradient the clip removed), `policy/ratio_mean` (of r),
        `policy/kl_mean` (k3 of rollout to current policy), `policy/behave_masked_fraction` (tokens dropped for their behaviour weight),
        `policy/logprob_gap_mean` and `_max` (|prox_logprobs - rollout_logprobs|).

    Source: decoupled PPO, arXiv:2505.24298; dual clip, arXiv:1912.09729.
    """
    # Not `log_ratio`: a log-probability that is not finite must reach the loss, where the trainer sees it and skips the step.
    ratios = (logprobs - prox_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free = -ratios * advantages
    clipped = -ratios.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages
    losses = torch.maximum(free, clipped)
    removed = (clipped > free).detach()
    if config.dual_clip:
        bound = torch.where(advantages < 0, -config.dual_clip * advantages, torch.inf)
        removed = removed | (losses > bound)
        losses = torch.minimum(losses, bound)
    weights = behave_weights(prox_logprobs, rollout_logprobs, mode=config.behave_weight, cap=config.behave_cap)
    gap = (prox_logprobs - rollout_logprobs).abs()
    means = {
        "train/clip_fraction": removed,
        "policy/ratio_mean": ratios.detach(),
        "policy/kl_mean": k3(logprobs.detach(), rollout_logprobs),
        "policy/behave_masked_fraction": weights == 0,
        "policy/logprob_gap_mean": gap,
    }
    return TokenLosses(losses * weights, means, {"policy/logprob_gap_max": gap})


def cross_entropy(logprobs: Tensor) -> TokenLosses:
    """Negative log-likelihood, [M]."""
    return TokenLosses(-logprobs)
