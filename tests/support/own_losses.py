"""Objectives for tests of `offbeat.losses.own`: some that work, and some that do not."""

import torch

from offbeat.losses.own import LossTokens, TokenLosses


def clipped(tokens: LossTokens, constants: dict) -> TokenLosses:
    free = tokens.ratio * tokens.advantages
    kept = tokens.ratio.clamp(constants["low"], constants["high"]) * tokens.advantages
    return TokenLosses(-torch.minimum(free, kept), {"clipped": kept < free})


def geometric(tokens, constants):
    gaps = tokens.over_sequences((tokens.logprobs - tokens.anchor_logprobs).clamp(-20, 20))
    return TokenLosses(-gaps.exp() * tokens.advantages, {"total": tokens.over_sequences(tokens.ratio, "sum")})


def everything(tokens, constants):
    distance = (tokens.logprobs - tokens.ref_logprobs) ** 2 + 0.1 * (tokens.logprobs - tokens.rollout_logprobs) ** 2
    return TokenLosses(-tokens.ratio * tokens.advantages + distance - 0.3 * tokens.entropy, {"distance": distance})


def squared(tokens, constants):
    return TokenLosses((tokens.logprobs - tokens.anchor_logprobs) ** 2 + tokens.logprobs)


def counting(tokens, constants):
    return TokenLosses(tokens.over_sequences(torch.ones_like(tokens.logprobs), "sum") + 0 * tokens.logprobs)


def sums_all(tokens, constants):
    lengths = torch.zeros_like(tokens.logprobs).index_add(0, tokens.sequences, torch.ones_like(tokens.logprobs))
    return TokenLosses(-tokens.ratio * tokens.advantages / lengths[tokens.sequences])


def bad_shape(tokens, constants):
    return TokenLosses(-(tokens.ratio * tokens.advantages).mean())


def bad_metric(tokens, constants):
    return TokenLosses(-tokens.ratio * tokens.advantages, {"x": 1.0})


def bare(tokens, constants):
    return -tokens.ratio * tokens.advantages


def raises(tokens, constants):
    return TokenLosses(-tokens.ratio * constants["missing"])


def fickle(tokens, constants):
    return TokenLosses(-tokens.ratio * tokens.advantages, {f"n{len(tokens.ratio)}": tokens.ratio})


def overflows(tokens, constants):
    return TokenLosses(-tokens.advantages * (100 - 100 * tokens.logprobs).exp())


def endless_slope(tokens, constants):
    return TokenLosses(-tokens.advantages * (tokens.logprobs - tokens.logprobs.detach()).clamp(min=0).sqrt())


def without_gradient(tokens, constants):
    return TokenLosses((-tokens.ratio * tokens.advantages).detach())


def over_the_batch(tokens, constants):
    return TokenLosses(-tokens.ratio * tokens.advantages * tokens.ratio.detach().mean())


def random(tokens, constants):
    return TokenLosses(-tokens.ratio * tokens.advantages * torch.rand_like(tokens.ratio))


_calls = []


def counts_calls(tokens, constants):
    _calls.append(1)
    return TokenLosses(-tokens.ratio * tokens.advantages * len(_calls))
