"""Behaviour weights and the KL estimate, against a loop."""

import math

import pytest
import torch

from offbeat.losses.ratios import MAX_LOG_RATIO, behave_weights, k3, log_ratio

PROX = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.0])
ROLLOUT = torch.tensor([-1.0, -4.0, -0.9, -2.0, -math.inf])


@pytest.mark.parametrize("mode", ["none", "mask", "clamp"])
def test_behave_weights_equal_a_loop(mode):
    expected = []
    for prox, rollout in zip(PROX.tolist(), ROLLOUT.tolist(), strict=True):
        ratio = math.exp(prox - rollout) if math.isfinite(prox - rollout) else 1.0
        above = {"none": 1.0, "mask": 0.0, "clamp": 5.0}[mode]
        expected.append(1.0 if mode == "none" else ratio if ratio <= 5.0 else above)
    assert behave_weights(PROX, ROLLOUT, mode=mode, cap=5.0).tolist() == pytest.approx(expected, rel=1e-6)


def test_a_weight_exactly_at_the_cap_is_kept():
    assert behave_weights(torch.zeros(1), torch.zeros(1), mode="mask", cap=1.0).tolist() == [1.0]


def test_behave_weights_carry_no_gradient():
    prox = PROX.clone().requires_grad_()
    assert not behave_weights(prox, ROLLOUT, mode="clamp", cap=5.0).requires_grad


def test_log_ratios_are_bounded_and_finite():
    new = torch.tensor([0.0, -1000.0, math.nan, -math.inf])
    old = torch.tensor([-1000.0, 0.0, 0.0, 0.0])
    assert log_ratio(new, old).tolist() == [MAX_LOG_RATIO, -MAX_LOG_RATIO, 0.0, 0.0]


def test_k3_averages_to_the_divergence_over_the_old_policy():
    old, new = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    exact = sum(p * math.log(p / q) for p, q in zip(old.tolist(), new.tolist(), strict=True))
    estimates = k3(new.log(), old.log())
    assert (old * estimates).sum().item() == pytest.approx(exact, rel=1e-5)
    assert (estimates >= 0).all()
