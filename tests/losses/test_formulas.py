"""Losses against loops that know nothing of the vectorised versions: decoupled PPO-clip in float64, the others target by target."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from datum_samples import LOSSES_OF_ALL, make_datums, reference
from offbeat.algorithms.objectives import CLIENT_LOSSES, OBJECTIVES, client_loss, policy_loss
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.batch import Batch
from offbeat.losses.formulas import FORMULAS, Targets, decoupled_ppo, target_losses


def ppo_clip(logprobs, prox, rollout, advantages, *, config):
    """Decoupled PPO-clip of some targets, without weights."""
    columns = {"prox_logprobs": prox, "rollout_logprobs": rollout, "advantages": advantages}
    return decoupled_ppo(Targets(logprobs, columns, policy_loss(config).constants, torch.zeros(0, dtype=torch.int64)))


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
    if config.weight == "none":
        weight = 1.0
    elif weight > config.weight_high:
        weight = 0.0 if config.weight == "mask" else config.weight_high
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
    config = AlgorithmConfig(weight=behave_weight, weight_high=2.0, dual_clip=dual_clip, clip_low=0.2, clip_high=0.28)
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


def test_without_proximal_logprobs_those_of_the_pass_itself_are_taken():
    logprobs, _, rollout, advantages = random_tokens(1)
    batch = Batch.of_next_tokens(
        np.zeros(401, np.int32), np.arange(401) > 0, lengths=[401], losses=(policy_loss(AlgorithmConfig()),),
        columns={name: np.concatenate([[0], values.numpy()]) for name, values in (
            ("rollout_logprobs", rollout), ("advantages", advantages), ("loss_weights", torch.full((400,), 0.5)))})
    logprobs = logprobs.float().requires_grad_()
    got = target_losses(logprobs, batch, np.arange(400))
    expected = ppo_clip(logprobs, logprobs.detach(), rollout.float(), advantages.float(), config=AlgorithmConfig())
    assert torch.equal(got.losses, 0.5 * expected.losses) and got.means.keys() == expected.means.keys()
    some = np.arange(7, 90)
    moved = target_losses(logprobs[7:90], batch.with_columns(prox_logprobs=rollout.numpy()), some)
    theirs = ppo_clip(logprobs, rollout.float(), rollout.float(), advantages.float(), config=AlgorithmConfig())
    torch.testing.assert_close(moved.losses, 0.5 * theirs.losses[7:90])


# -- losses that clients ask for -----------------------------------------------------------------------------------------------------------


def leaf(batch, *, seed=0):
    gaps = 0.3 * np.random.default_rng(seed).standard_normal(batch.num_targets)
    rollout = batch.columns["rollout_logprobs"]
    return torch.tensor(np.where(rollout != 0, rollout, -3) + gaps, dtype=torch.float32, requires_grad=True)


def losses_of(logprobs, batch):
    return target_losses(logprobs, batch, np.arange(batch.num_targets)).losses


def by_sequence(losses, batch):
    return torch.zeros(len(batch)).index_add(0, torch.from_numpy(batch.target_sequences), losses)


def is_masked(batch):
    return (batch.columns["loss_weights"] == 0) & (batch.columns["ratio_mask"] == 0)


@pytest.mark.parametrize("losses", [*((spec,) for spec in LOSSES_OF_ALL), LOSSES_OF_ALL], ids=[*CLIENT_LOSSES, "all at once"])
@pytest.mark.parametrize("dense", [True, False])
def test_a_loss_and_its_gradient_are_those_of_the_formula(losses, dense):
    batch = make_datums(18, seed=3, losses=losses, dense=dense)
    mine, theirs = leaf(batch), leaf(batch)
    got, expected = by_sequence(losses_of(mine, batch), batch), reference(theirs, batch)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    got.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    assert mine.grad.any()


def test_some_targets_of_a_batch_have_the_losses_that_they_have_among_all():
    batch = make_datums(18, seed=3)
    logprobs = leaf(batch)
    index = np.flatnonzero(np.isin(batch.target_sequences, [2, 5, 11, 12]))
    assert torch.equal(target_losses(logprobs[torch.from_numpy(index)], batch, index).losses, losses_of(logprobs, batch)[index])


def test_the_clips_of_the_samples_do_act():
    batch = make_datums(18, seed=3)
    logprobs = leaf(batch)
    losses_of(logprobs, batch).sum().backward()
    for name in ("ppo", "gspo"):
        own = (batch.ids("loss_ids") == [spec.name for spec in LOSSES_OF_ALL].index(name))[batch.target_sequences]
        own &= batch.columns["advantages"] != 0
        assert 0 < np.count_nonzero(logprobs.grad.numpy()[own] == 0) < np.count_nonzero(own)


@pytest.mark.parametrize("spec", LOSSES_OF_ALL, ids=lambda spec: spec.name)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_what_is_masked_adds_exactly_nothing_whatever_it_holds(spec, poison):
    batch = make_datums(4, losses=(spec,), dense=True)
    masked = is_masked(batch)
    assert masked.any() and not masked.all()
    clean = leaf(batch)
    expected = losses_of(clean, batch)
    expected.sum().backward()
    own = batch.columns["rollout_logprobs"]
    for rollout in (own, np.where(masked, -poison, own)):
        poisoned = torch.where(torch.from_numpy(masked), poison, clean.detach()).requires_grad_()
        got = losses_of(poisoned, batch.with_columns(rollout_logprobs=rollout))
        assert torch.equal(got, expected) and not got[torch.from_numpy(masked)].any()
        got.sum().backward()
        assert torch.equal(poisoned.grad, clean.grad) and not poisoned.grad[torch.from_numpy(masked)].any()


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
def test_a_policy_far_from_the_one_that_sampled_gives_finite_numbers(name):
    batch = make_datums(4, losses=(client_loss(name),), dense=True)
    for gap in (-500.0, 500.0):
        logprobs = torch.from_numpy(batch.columns["rollout_logprobs"] + np.float32(gap)).requires_grad_()
        losses = losses_of(logprobs, batch)
        losses.sum().backward()
        assert losses.isfinite().all() and logprobs.grad.isfinite().all()


def test_gspo_takes_its_mean_over_the_mask_alone_and_also_where_the_advantage_is_zero():
    spec = client_loss("gspo", clip_low=0.0, clip_high=100.0)
    batch = make_datums(1, losses=(spec,), dense=True, prompt_len=1, max_answer=2)
    batch = batch.with_columns(
        rollout_logprobs=np.array([-1.0, -1.0]), advantages=np.array([2.0, 0.0]), loss_weights=np.ones(2), ratio_mask=np.ones(2))
    losses = losses_of(torch.tensor([-1.0, -3.0]), batch)
    assert losses.tolist() == pytest.approx([-2 * np.exp(-1.0), 0.0])
    alone = losses_of(torch.tensor([-1.0, -3.0]), batch.with_columns(ratio_mask=np.array([1, 0])))
    assert alone.tolist() == pytest.approx([-2.0, 0.0])


def test_cross_entropy_is_the_weighted_negative_logprob():
    batch = make_datums(1, losses=LOSSES_OF_ALL[:1], dense=True, prompt_len=1, max_answer=2).with_columns(loss_weights=np.array([1, 0.5]))
    assert losses_of(torch.tensor([-0.5, -2.0]), batch).tolist() == [0.5, 1.0]


def test_every_objective_has_a_formula_and_none_of_no_targets_is_nothing():
    assert FORMULAS.keys() == OBJECTIVES.keys()
    for spec in (*LOSSES_OF_ALL, policy_loss(AlgorithmConfig())):
        nothing = replace(make_datums(3, losses=LOSSES_OF_ALL[:1]).select([]), losses=(spec,))
        assert losses_of(torch.zeros(0), nothing).shape == (0,)
