"""Limits in which one objective becomes another, and which targets are clipped; `test_compose` compares all with a slow version."""

import math

import pytest
import torch

from offbeat.config.objectives import OBJECTIVES
from offbeat.losses.objectives import FORMULAS, Clips
from offbeat.losses.targets import Targets

OF_TOKENS = [name for name, objective in OBJECTIVES.items() if not objective.group and name not in ("value", "forward_kl", "reverse_kl")]
"""Those that compare the sequences of a group are tested in `test_pairs`."""

CLIP = {"clip_low": 0.8, "clip_high": 1.2}
ALL = torch.ones(400, dtype=torch.bool)


def targets_of(*, sequences=None, spread=0.5, **constants):
    generator = torch.Generator().manual_seed(0)
    anchor = -4 * torch.rand(400, generator=generator).double() - 0.01
    logprobs = (anchor + spread * torch.randn(400, generator=generator).double()).clamp(max=-1e-3).requires_grad_()
    advantages = torch.randn(400, generator=generator).double()
    numbers = torch.arange(400) if sequences is None else sequences
    return Targets(logprobs, anchor, anchor, anchor, advantages, ALL, numbers, constants, num_sequences=400)


def loss_and_gradient(name, targets):
    losses = FORMULAS[name].losses(targets, ALL)
    (gradient,) = torch.autograd.grad(losses.sum(), targets.logprobs)
    return losses.detach(), gradient


def assert_same(one, other):
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_the_table_and_the_formulas_have_the_same_names():
    assert FORMULAS.keys() == OBJECTIVES.keys()


def test_gspo_of_single_tokens_is_ppo():
    assert_same(loss_and_gradient("gspo", targets_of(**CLIP)), loss_and_gradient("ppo", targets_of(**CLIP)))


def test_gspo_within_its_bounds_has_the_gradient_of_its_sequence_form():
    sequences = torch.arange(400) // 20
    targets = targets_of(sequences=sequences, clip_low=0.0, clip_high=1e9)
    advantages = targets.advantages[sequences * 20]
    targets = Targets(*(getattr(targets, name) for name in ("logprobs", "prox", "rollout", "anchor")), advantages, ALL, sequences,
                      targets.constants, num_sequences=20)
    means = torch.zeros(20).double().index_add(0, sequences, targets.logprobs - targets.anchor) / 20
    (expected,) = torch.autograd.grad((-means.exp()[sequences] * advantages).sum(), targets.logprobs)
    torch.testing.assert_close(loss_and_gradient("gspo", targets)[1], expected)
    # gmpo without a bound has that gradient, too
    free = Targets(*(getattr(targets, name) for name in ("logprobs", "prox", "rollout", "anchor")), advantages, ALL, sequences,
                   {"clip_low": 1e9, "clip_high": 1e9}, num_sequences=20)
    torch.testing.assert_close(loss_and_gradient("gmpo", free)[1], expected)


def test_gmpo_of_single_tokens_is_ppo_with_logarithmic_bounds():
    mine = loss_and_gradient("gmpo", targets_of(clip_low=0.4, clip_high=0.3))
    assert_same(mine, loss_and_gradient("ppo", targets_of(clip_low=math.exp(-0.4), clip_high=math.exp(0.3))))


def test_the_slope_of_sapo_is_one_at_a_ratio_of_one_for_any_temperature():
    for tau in (0.3, 1.0, 1.05, 7.0):
        targets = targets_of(spread=0.0, tau_low=tau, tau_high=tau)
        torch.testing.assert_close(loss_and_gradient("sapo", targets)[1], -targets.advantages)
        torch.testing.assert_close(FORMULAS["sapo"].metrics["gate"](targets), torch.ones(400).double())


def test_sapo_takes_its_temperature_by_the_sign_of_the_advantage():
    mine, up, down = (loss_and_gradient("sapo", targets_of(tau_low=low, tau_high=high)) for low, high in ((2, 1), (1, 1), (2, 2)))
    positive = targets_of().advantages > 0
    for got, high, low in zip(mine, up, down, strict=True):
        torch.testing.assert_close(got, torch.where(positive, high, low))


def test_the_dual_clip_is_a_clip_of_the_ratio_from_above_where_the_advantage_is_negative():
    """As the delta of 2505.07291: min(r, delta) * |A| for A < 0."""
    targets = targets_of(spread=1.5, **CLIP, dual_clip=3.0)
    losses, gradient = loss_and_gradient("ppo", targets)
    ratios = (targets.logprobs - targets.anchor).exp()
    advantages = targets.advantages
    capped = torch.where(advantages < 0, ratios.clamp(max=3.0), ratios)
    expected = -torch.minimum(capped * advantages, ratios.clamp(0.8, 1.2) * advantages)
    (slope,) = torch.autograd.grad(expected.sum(), targets.logprobs)
    assert_same((losses, gradient), (expected.detach(), slope))
    assert ((advantages < 0) & (ratios > 3)).any()


def test_dppo_and_ppo_without_bounds_are_importance_sampling():
    free = {"clip_low": 1e9, "clip_high": 1e9, "divergence": "tv"}
    expected = loss_and_gradient("importance_sampling", targets_of())
    assert_same(loss_and_gradient("dppo", targets_of(**free)), expected)
    assert_same(loss_and_gradient("dppo", targets_of(**{**free, "divergence": "kl"})), expected)
    assert_same(loss_and_gradient("ppo", targets_of(clip_low=0.0, clip_high=1e9)), expected)


def test_cispo_without_bounds_and_reinforce_at_a_ratio_of_one_have_the_gradient_of_importance_sampling():
    _, expected = loss_and_gradient("importance_sampling", targets_of())
    torch.testing.assert_close(loss_and_gradient("cispo", targets_of(clip_low=0.0, clip_high=1e9))[1], expected)
    still = targets_of(spread=0.0)
    torch.testing.assert_close(loss_and_gradient("reinforce", still)[1], loss_and_gradient("importance_sampling", still)[1])


@pytest.mark.parametrize("name", OF_TOKENS)
def test_a_gradient_is_removed_exactly_where_a_clip_is_reported(name):
    constants = {key: constant.default for key, constant in OBJECTIVES[name].constants.items()}
    constants |= {"dual_clip": 1.5} if name == "ppo" else {}
    targets = targets_of(spread=1.0, **constants)
    formula = FORMULAS[name]
    clips = formula.clips(targets) if formula.clips else Clips.none(targets)
    _, gradient = loss_and_gradient(name, targets)
    if name != "cispo":  # whose clip bounds the weight and keeps the gradient
        assert torch.equal(gradient == 0, clips.any)
    assert not (clips.low & clips.high).any() and not ((clips.low | clips.high) & ~clips.any).any()
    assert (formula.clips is not None) == bool(OBJECTIVES[name].bounds)
    assert clips.low.any() == clips.high.any() == (formula.clips is not None) or name == "cispo"


@pytest.mark.parametrize("gap", [-500.0, 500.0])
@pytest.mark.parametrize("name", OF_TOKENS)
def test_ratios_that_overflow_have_finite_losses_and_gradients(name, gap):
    constants = {key: constant.default for key, constant in OBJECTIVES[name].constants.items()}
    old = torch.full((2,), -600.0)
    targets = Targets(
        (old + gap).requires_grad_(), old, old, old, torch.tensor([1.0, -1.0]), torch.ones(2, dtype=torch.bool), torch.arange(2), constants,
        num_sequences=2)
    losses = FORMULAS[name].losses(targets, torch.ones(2, dtype=torch.bool))
    losses.sum().backward()
    assert losses.isfinite().all() and targets.logprobs.grad.isfinite().all()


def test_a_value_is_worth_half_its_squared_error_and_no_less_for_a_move_past_the_clip():
    values = torch.tensor([1.0, 1.0, -2.0, torch.nan], requires_grad=True)
    columns = {"returns": torch.tensor([0.0, 3.0, 0.0, 0.0]), "values": torch.tensor([1.5, 0.0, 0.0, 0.0])}
    counted = torch.tensor([True, True, True, False])
    numbers = torch.zeros(0, dtype=torch.int64)
    free, clipped = ([0.5, 2.0, 2.0, 0.0], [1.0, -2.0, -2.0, 0.0]), ([0.845, 3.92, 2.0, 0.0], [0.0, 0.0, -2.0, 0.0])
    for clip, (expected, slopes) in ((0.0, free), (0.2, clipped)):
        targets = Targets(values, values, values, values, torch.ones(4), counted, numbers, {"clip": clip}, columns)
        losses = FORMULAS["value"].losses(targets, counted)
        assert losses.tolist() == pytest.approx(expected)
        (gradient,) = torch.autograd.grad(losses.sum(), values)
        assert gradient.tolist() == slopes


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_over_all_tokens_the_divergences_from_a_teacher_have_their_values_and_gradients(temperature):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 7, generator=generator).double().requires_grad_()
    teacher = torch.randn(5, 7, generator=generator).double().div(temperature).log_softmax(-1)
    own, counted = logits.log_softmax(-1), torch.ones(35, dtype=torch.bool)
    numbers = torch.zeros(0, dtype=torch.int64)
    for name, expected in (("forward_kl", teacher.exp() * (teacher - own)), ("reverse_kl", own.exp() * (own - teacher))):
        flat = own.flatten()
        targets = Targets(flat, flat, flat, flat, torch.ones(35).double(), counted, numbers, {}, {
            "teacher_logprobs": teacher.flatten(), "teacher_least": teacher.min(1, keepdim=True).values.expand(5, 7).flatten()})
        found = FORMULAS[name].losses(targets, counted)
        torch.testing.assert_close(found.view(5, 7).sum(1), expected.sum(1))
        (mine,) = torch.autograd.grad(found.sum(), logits, retain_graph=True)
        (theirs,) = torch.autograd.grad(expected.sum(), logits, retain_graph=True)
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl"])
def test_over_some_tokens_the_divergences_are_least_where_the_policy_has_the_teachers_probabilities(name):
    teacher = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)  # of three of five tokens, renormalised
    columns = {"teacher_logprobs": teacher.log(), "teacher_least": teacher.log().min().expand(3)}
    counted = torch.ones(3, dtype=torch.bool)

    def loss_and_slope(logits):
        leaf = logits.clone().requires_grad_()
        own = leaf.log_softmax(-1)[:3]
        targets = Targets(own, own, own, own, torch.ones(3).double(), counted, torch.zeros(0, dtype=torch.int64), {}, columns)
        loss = FORMULAS[name].losses(targets, counted).sum()
        return loss.item(), torch.autograd.grad(loss, leaf)[0].norm().item()

    same = torch.cat([teacher.log(), torch.full((2,), -60.0).double()])
    assert loss_and_slope(same) == pytest.approx((0, 0), abs=1e-9)
    generator = torch.Generator().manual_seed(2)
    for spread in (0.1, 1.0, 5.0):
        loss, slope = loss_and_slope(same.clamp(min=-8) + spread * torch.randn(5, generator=generator).double())
        assert loss > 1e-4 and slope > 1e-4
