"""Ratios and divergences of two policies on the sampled tokens. Pure functions on [M] log-probabilities, used by all of `losses`."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this: exp(20) is far outside any clip range, and the clamp keeps 0 * inf out of the backward pass."""


def log_ratio(new_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return [M] log(new / old) within +-MAX_LOG_RATIO; 0 where it is not finite, which says nothing about either policy."""
    difference = new_logprobs - old_logprobs
    return torch.where(torch.isfinite(difference), difference, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def current_log_ratio(logprobs: Tensor, anchor: Tensor) -> Tensor:
    """Return [M] log(current / anchor) within +-MAX_LOG_RATIO, with the gradient of `logprobs`.

    NaN where the current log-probability is not finite: it must reach the loss, where the trainer sees it and skips the step.
    """
    difference = torch.where(logprobs.isinf(), torch.nan, logprobs - anchor)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def behave_log_ratio(prox_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return [M] log(proximal / behaviour) within +-MAX_LOG_RATIO, without gradient.

    A rollout log-probability that is not finite says that the token was never sampled like this, and counts as a ratio of
    exp(MAX_LOG_RATIO). A proximal one that is not finite counts as a ratio of 1, so that its current one reaches the loss.
    """
    known = torch.where(torch.isfinite(prox_logprobs), (prox_logprobs - rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0)
    return torch.where(torch.isfinite(rollout_logprobs), known, MAX_LOG_RATIO).detach()


def k3(new_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Estimate KL(old || new) per token, [M], >= 0; unbiased for tokens sampled from old (http://joschu.net/blog/kl-approx.html)."""
    return k3_of(log_ratio(new_logprobs, old_logprobs))


def k3_of(log_ratios: Tensor) -> Tensor:
    """Return [M] exp(x) - 1 - x of log-ratios x = log(new / old); see `k3`."""
    return log_ratios.exp() - 1.0 - log_ratios


def bernoulli_kl(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return [M] float64, KL(p || q) between the Bernoulli distributions "this token or any other" of two policies.

    Their [M] log p and log q are at most 0; numbers above are taken as 0, and NaN stays NaN.
    """
    log_p, log_q = logprobs.double().clamp(max=0.0), other_logprobs.double().clamp(max=0.0)
    others_p, others_q = -torch.expm1(log_p), -torch.expm1(log_q)
    own = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q))
    return own + torch.where(others_p == 0, 0.0, others_p * (others_p.log() - others_q.log()))
