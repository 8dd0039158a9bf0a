"""Decoupled PPO-clip against a loop in float64 that knows nothing of the vectorised version."""

import math

import pytest
import torch

from offbeat.algorithms.losses import cross_entropy, ppo_clip
from offbeat.config.algorithms import AlgorithmConfig


def slow_ppo(logprob, prox, rollout, advantage, config):
    """Loss, d loss / d logprob and whether the clip removed the gradient, of one token; all by cases."""
    ratio = math.exp(logprob - prox)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if advantage >= 0:
        loss, moves = (-ratio * advantage, True) if ratio <= high else (-high * advantage, False)
    else:
        loss, moves = (-ratio * advantage, True) if ratio >= low else (-low * advantage, False)
        if config.dual_clip and loss > config.dual_clip * -advantage:
            loss, moves = config.dual_clip * -advantage, False
    weight = math.exp(prox - rollout)
    if config.behave_weight == "none":
        weight = 1.0
    elif weight > config.behave_cap:
        weight = 0.0 if config.behave_weight == "mask" else config.behave_cap
    slope = -ratio * advantage if moves else 0.0
    return weight * loss, weight * slope, not moves and advantage != 0, weight == 0, ratio


def random_tokens(seed, count=400):
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(count, generator=generator, dtype=torch.float64) * 4
    prox = rollout + torch.randn(count, generator=generator, dtype=torch.float64)
    logprobs = prox + 0.4 * torch.randn(count, generator=generator, dtype=torch.float64)
    advantages = torch.randn(count, generator=generator, dtype=torch.float64)
    advantages[::17] = 0.0
    return logprobs, prox, rollout, advantages


@pytest.mark.parametrize("behave_weight", ["none", "mask", "clamp"])
@pytest.mark.parametrize("dual_clip", [0.0, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradient_equal_the_slow_version(behave_weight, dual_clip, dtype):
    config = AlgorithmConfig(behave_weight=behave_weight, behave_cap=2.0, dual_clip=dual_clip, clip_low=0.2, clip_high=0.28)
    logprobs, prox, rollout, advantages = (values.to(dtype) for values in random_tokens(3))
    logprobs.requires_grad_()
    result = ppo_clip(logprobs, prox, rollout, advantages, config=config)
    result.losses.sum().backward()

    tokens = zip(logprobs.tolist(), prox.tolist(), rollout.tolist(), advantages.tolist(), strict=True)
    losses, slopes, removed, masked, ratios = zip(*(slow_ppo(*token, config) for token in tokens), strict=True)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(result.losses.detach(), torch.tensor(losses, dtype=dtype), **tolerance)
    torch.testing.assert_close(logprobs.grad, torch.tensor(slopes, dtype=dtype), **tolerance)
    assert result.means["train/clip_fraction"].tolist() == list(removed)
    assert result.means["policy/behave_masked_fraction"].tolist() == list(masked)
    torch.testing.assert_close(result.means["policy/ratio_mean"], torch.tensor(ratios, dtype=dtype), **tolerance)
    gaps = (prox - rollout).abs()
    assert torch.equal(result.means["policy/logprob_gap_mean"], gaps)
    assert torch.equal(result.maxima["policy/logprob_gap_max"], gaps)
    assert any(removed)
    assert not any(values.requires_grad for values in result.means.values())


def test_on_policy_the_gradient_is_the_policy_gradient():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.5, -2.0])
    result = ppo_clip(logprobs, logprobs.detach(), logprobs.detach(), advantages, config=AlgorithmConfig())
    result.losses.sum().backward()
    assert result.losses.tolist() == [-0.5, 2.0]
    assert logprobs.grad.tolist() == [-0.5, 2.0]
    assert {name: values.tolist() for name, values in result.means.items()} == {
        "train/clip_fraction": [False, False], "policy/ratio_mean": [1.0, 1.0], "policy/kl_mean": [0.0, 0.0],
        "policy/behave_masked_fraction": [False, False], "policy/logprob_gap_mean": [0.0, 0.0]}


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_that_overflows_has_a_finite_loss_and_gradient(advantage):
    logprobs = torch.zeros(1, requires_grad=True)
    result = ppo_clip(logprobs, torch.full((1,), -500.0), torch.zeros(1), torch.tensor([advantage]), config=AlgorithmConfig())
    result.losses.sum().backward()
    assert torch.isfinite(result.losses).all()
    assert torch.isfinite(logprobs.grad).all()


def test_a_logprob_that_is_not_a_number_reaches_the_loss():
    logprobs = torch.tensor([math.nan])
    result = ppo_clip(logprobs, logprobs, torch.zeros(1), torch.ones(1), config=AlgorithmConfig())
    assert result.losses.isnan().all()


def test_no_tokens_give_no_losses():
    empty = torch.zeros(0, requires_grad=True)
    assert ppo_clip(empty, empty.detach(), empty.detach(), empty.detach(), config=AlgorithmConfig()).losses.sum() == 0


def test_cross_entropy_is_the_negative_logprob():
    assert cross_entropy(torch.tensor([-0.5, -2.0])).losses.tolist() == [0.5, 2.0]
