"""How far two policies differ on the sampled tokens, and which weights tokens of an older policy get.

Pure torch functions on [M] tensors of log-probabilities, used by `losses`.
"""

from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this: exp(20) is far outside any clip range, and the clamp keeps 0 * inf out of the backward pass."""


def log_ratio(new_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return log(new / old) per token, within +-MAX_LOG_RATIO; 0 where it is not finite, which says nothing about either policy.

    Args:
        new_logprobs: [M] float; gradients flow through it.
        old_logprobs: [M] float.
    """
    difference = new_logprobs - old_logprobs
    return torch.where(torch.isfinite(difference), difference, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def behave_weights(
    prox_logprobs: Tensor, rollout_logprobs: Tensor, *, mode: Literal["none", "mask", "clamp"], cap: float,
) -> Tensor:
    """The importance weight proximal / behaviour policy of each token.

    Args:
        prox_logprobs: [M] float, under the policy that updates are kept close to.
        rollout_logprobs: [M] float, under the policy that sampled.
        mode: "none" gives ones; "mask" gives 0 to tokens above `cap`; "clamp" gives them `cap`.
        cap: largest ratio that is trusted.

    Returns:
        [M] float, >= 0, without gradient.

    Source: decoupled PPO, arXiv:2505.24298; masking, AReaL's token-level rejection.
    """
    if mode == "none":
        return torch.ones_like(rollout_logprobs)
    weights = log_ratio(prox_logprobs, rollout_logprobs).detach().exp()
    if mode == "clamp":
        return weights.clamp(max=cap)
    return torch.where(weights <= cap, weights, 0.0)


def k3(new_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Estimate KL(old || new) per token, >= 0; unbiased for tokens sampled from old (http://joschu.net/blog/kl-approx.html)."""
    log_ratios = log_ratio(new_logprobs, old_logprobs)
    return log_ratios.exp() - 1.0 - log_ratios
