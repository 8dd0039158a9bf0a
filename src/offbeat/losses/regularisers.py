"""Terms that are added to the loss of every loss token, whatever its advantage and weight.

With lp the trained log-probability, d = lp - ref, r = exp(lp - anchor) and H the entropy of the token's whole distribution:

    k2        d^2 / 2             on-policy, its gradient is the gradient of KL(current || reference)
    k3        exp(-d) - 1 + d     its value estimates KL(current || reference), its gradient is the gradient of KL(reference || current)
    ratio_k3  r * k3              r with gradient: value and gradient of KL(current || reference), also off-policy
    entropy   -H                  so that a positive coefficient raises the entropy
    drift     (lp - rollout)^2
    imitation -lp where `imitate_mask` is not 0
    kl_cov    |lp - prox|         of the targets that `algorithms.selection` has chosen from the whole batch, 0 of others

Source: http://joschu.net/blog/kl-approx.html; k3 in the loss, arXiv:2402.03300; ratio_k3, arXiv:2512.02556; imitation, arXiv:2504.05118;
KL-Cov, arXiv:2505.22617.
"""

import torch
from torch import Tensor

from offbeat.losses.ratios import current_log_ratio, k3_of
from offbeat.losses.targets import Targets, only


def regulariser(kind: str, targets: Targets, is_loss: Tensor, *, ref_logprobs: Tensor | None, entropy: Tensor | None) -> Tensor:
    """Compute one term, [M] float32 with gradient.

    Args:
        is_loss: [M] bool; the term of all other targets is 0 without gradient. So is the term of a target whose reference or rollout
            log-probability it needs and that is not finite.
        ref_logprobs: [M] float32, for kinds that compare with the reference policy.
        entropy: [M] float32 with gradient, for `entropy`.
    """
    if kind == "entropy":
        assert entropy is not None, "the entropy term needs the entropy of each target, with gradient"
        return -only(is_loss, entropy)
    if kind == "drift":
        return only(is_loss & torch.isfinite(targets.rollout), targets.logprobs - targets.rollout).square()
    if kind == "imitation":
        return -only(is_loss & (targets.columns["imitate_mask"] != 0), targets.logprobs)
    if kind == "kl_cov":
        chosen = is_loss & (targets.columns["kl_cov_mask"] != 0) & torch.isfinite(targets.prox)
        return only(chosen, targets.logprobs - targets.prox).abs()
    assert ref_logprobs is not None, f"the term {kind} needs the column ref_logprobs"
    known = is_loss & torch.isfinite(ref_logprobs)
    if kind == "k2":
        return only(known, targets.logprobs - ref_logprobs).square() / 2
    estimates = k3_of(-only(known, current_log_ratio(targets.logprobs, ref_logprobs)))
    if kind == "k3":
        return estimates
    assert kind == "ratio_k3", f"unknown regulariser {kind!r}"
    return only(known, current_log_ratio(targets.logprobs, targets.anchor)).exp() * estimates
