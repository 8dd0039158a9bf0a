"""The losses of datums against the published formulas, written out target by target."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from datum_samples import LOSSES_OF_ALL, make_datums, reference
from offbeat.algorithms.datum_losses import _FORMULAS, datum_losses
from offbeat.data.datums import LOSSES, LossSpec


def leaf(batch, *, seed=0):
    gaps = 0.3 * np.random.default_rng(seed).standard_normal(batch.num_targets)
    return torch.tensor(np.where(batch.rollout_logprobs != 0, batch.rollout_logprobs, -3) + gaps, dtype=torch.float32, requires_grad=True)


def by_sequence(losses, batch):
    return torch.zeros(len(batch)).index_add(0, torch.from_numpy(batch.target_sequences), losses)


@pytest.mark.parametrize("losses", [*((spec,) for spec in LOSSES_OF_ALL), LOSSES_OF_ALL], ids=[*LOSSES, "all at once"])
@pytest.mark.parametrize("dense", [True, False])
def test_a_loss_and_its_gradient_are_those_of_the_formula(losses, dense):
    batch = make_datums(18, seed=3, losses=losses, dense=dense)
    mine, theirs = leaf(batch), leaf(batch)
    got, expected = by_sequence(datum_losses(mine, batch), batch), reference(theirs, batch)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    got.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    assert mine.grad.any()


def test_the_clips_of_the_samples_do_act():
    batch = make_datums(18, seed=3)
    logprobs = leaf(batch)
    datum_losses(logprobs, batch).sum().backward()
    for name in ("ppo", "gspo"):
        own = (batch.loss_ids == [spec.name for spec in LOSSES_OF_ALL].index(name))[batch.target_sequences] & (batch.advantages != 0)
        assert 0 < np.count_nonzero(logprobs.grad.numpy()[own] == 0) < np.count_nonzero(own)


@pytest.mark.parametrize("spec", LOSSES_OF_ALL, ids=lambda spec: spec.name)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_what_is_masked_adds_exactly_nothing_whatever_it_holds(spec, poison):
    batch = make_datums(4, losses=(spec,), dense=True)
    masked = (batch.weights == 0) & (batch.advantages == 0) & ~batch.ratio_mask
    assert masked.any() and not masked.all()
    clean = leaf(batch)
    expected = datum_losses(clean, batch)
    expected.sum().backward()
    for rollout in (batch.rollout_logprobs, np.where(masked, -poison, batch.rollout_logprobs)):
        poisoned = torch.where(torch.from_numpy(masked), poison, clean.detach()).requires_grad_()
        got = datum_losses(poisoned, replace(batch, rollout_logprobs=rollout))
        assert torch.equal(got, expected) and not got[torch.from_numpy(masked)].any()
        got.sum().backward()
        assert torch.equal(poisoned.grad, clean.grad) and not poisoned.grad[torch.from_numpy(masked)].any()


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
def test_a_policy_far_from_the_one_that_sampled_gives_finite_numbers(name):
    batch = make_datums(4, losses=(LossSpec.of(name),), dense=True)
    for gap in (-500.0, 500.0):
        logprobs = torch.from_numpy(batch.rollout_logprobs + np.float32(gap)).requires_grad_()
        losses = datum_losses(logprobs, batch)
        losses.sum().backward()
        assert losses.isfinite().all() and logprobs.grad.isfinite().all()


def test_gspo_takes_its_mean_over_the_mask_alone_and_also_where_the_advantage_is_zero():
    spec = LossSpec.of("gspo", clip_low=0.0, clip_high=100.0)
    batch = make_datums(1, losses=(spec,), dense=True, prompt_len=1, max_answer=2)
    batch = replace(batch, rollout_logprobs=np.array([-1.0, -1.0]), advantages=np.array([2.0, 0.0]), ratio_mask=np.array([True, True]))
    losses = datum_losses(torch.tensor([-1.0, -3.0]), batch)
    assert losses.tolist() == pytest.approx([-2 * np.exp(-1.0), 0.0])
    alone = datum_losses(torch.tensor([-1.0, -3.0]), replace(batch, ratio_mask=np.array([True, False])))
    assert alone.tolist() == pytest.approx([-2.0, 0.0])


def test_every_loss_has_a_formula_and_none_of_no_targets_is_nothing():
    assert _FORMULAS.keys() == LOSSES.keys()
    assert datum_losses(torch.zeros(0), make_datums(3).select([])).shape == (0,)
