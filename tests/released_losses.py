"""The losses as they were before objectives, weights and filters could be combined: their numbers must stay the same to the bit."""

import torch

CAP = 20.0


def decoupled_ppo(lp, prox, rollout, advantages, *, clip_low, clip_high, dual_clip, mode, cap):
    """Losses [M] with gradient, without loss weights, and metrics by name."""
    ratios = (lp - prox).clamp(-CAP, CAP).exp()
    free = -ratios * advantages
    clipped = -ratios.clamp(clip_low, clip_high) * advantages
    losses = torch.maximum(free, clipped)
    removed = (clipped > free).detach()
    if dual_clip:
        bound = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        removed = removed | (losses > bound)
        losses = torch.minimum(losses, bound)
    weights = _behave_weights(prox, rollout, mode=mode, cap=cap)
    gap = (prox - rollout).abs()
    change = _log_ratio(lp.detach(), rollout)
    return losses * weights, {
        "train/clip_fraction": removed, "policy/ratio_mean": ratios.detach(), "policy/kl_mean": change.exp() - 1.0 - change,
        "policy/behave_masked_fraction": weights == 0, "policy/logprob_gap_mean": gap}, {"policy/logprob_gap_max": gap}


def client_losses(name, lp, columns, sequences, constants):
    """Losses [M] of a client's loss, with gradient and without loss weights."""
    rollout, advantages = columns.get("rollout_logprobs"), columns.get("advantages")
    if name == "cross_entropy":
        return -_only(columns["loss_weights"] != 0, lp)
    trained = advantages != 0
    ratios = _only(trained, lp - rollout).clamp(-CAP, CAP).exp()
    match name:
        case "importance_sampling":
            return -ratios * advantages
        case "ppo":
            return _clipped(ratios, advantages, constants)
        case "cispo":
            return -ratios.detach().clamp(constants["clip_low"], constants["clip_high"]) * _only(trained, lp) * advantages
        case "dro":
            gap = _only(trained, lp - rollout)
            return -(_only(trained, lp) * advantages - constants["beta"] / 2 * gap.square())
        case "gspo":
            mask = columns["ratio_mask"] != 0
            gaps = _only(mask, (lp - rollout).detach())
            zeros = gaps.new_zeros(int(sequences.max()) + 1 if len(gaps) else 0)
            sums, counts = zeros.index_add(0, sequences, gaps), zeros.index_add(0, sequences, mask.to(gaps.dtype))
            means = (sums / counts.clamp(min=1)).clamp(-CAP, CAP)
            own = _only(mask & trained, lp)
            return _clipped(means.exp()[sequences] * (own - own.detach()).exp(), _only(mask, advantages), constants)
    raise AssertionError(name)


def _clipped(ratios, advantages, constants):
    return -torch.minimum(ratios * advantages, ratios.clamp(constants["clip_low"], constants["clip_high"]) * advantages)


def _behave_weights(prox, rollout, *, mode, cap):
    if mode == "none":
        return torch.ones_like(rollout)
    weights = _log_ratio(prox, rollout).detach().exp()
    return weights.clamp(max=cap) if mode == "clamp" else torch.where(weights <= cap, weights, 0.0)


def _log_ratio(new, old):
    difference = new - old
    return torch.where(torch.isfinite(difference), difference, 0.0).clamp(-CAP, CAP)


def _only(condition, values):
    return torch.where(condition, values, 0.0)
