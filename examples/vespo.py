"""VESPO (arXiv:2602.10693) as an objective of one's own: nothing but this file is needed.

offbeat train run.toml --algorithm.objective examples/vespo.py:vespo --algorithm.anchor rollout --algorithm.weight none
"""

import torch

from offbeat.losses.own import LossTokens, TokenLosses


def vespo(tokens: LossTokens, constants: dict) -> TokenLosses:
    """The policy gradient, weighted by exp(lam + k log w - lam w), where w is the product of a sequence's ratios: 1 at w = 1."""
    log_w = tokens.over_sequences((tokens.logprobs - tokens.anchor_logprobs).detach(), "sum").clamp(-20, 20)
    gains = tokens.advantages >= 0
    k = torch.where(gains, constants.get("k_gain", 2.0), constants.get("k_loss", 3.0))
    lam = torch.where(gains, constants.get("lam_gain", 3.0), constants.get("lam_loss", 2.0))
    weight = (lam + k * log_w - lam * log_w.exp()).exp()
    return TokenLosses(-weight * tokens.advantages * tokens.logprobs, {"weight": weight})
