"""Ratios between policies and estimates of their divergence, by hand."""

import math

import pytest
import torch

from offbeat.losses.ratios import MAX_LOG_RATIO, behave_log_ratio, bernoulli_kl, current_log_ratio, k3, log_ratio


def test_log_ratios_are_bounded_and_finite():
    new = torch.tensor([0.0, -1000.0, math.nan, -math.inf])
    old = torch.tensor([-1000.0, 0.0, 0.0, 0.0])
    assert log_ratio(new, old).tolist() == [MAX_LOG_RATIO, -MAX_LOG_RATIO, 0.0, 0.0]


def test_the_current_log_ratio_is_bounded_and_lets_what_is_not_finite_through():
    current = torch.tensor([-1.0, -1000.0, math.nan, math.inf, -math.inf], requires_grad=True)
    logs = current_log_ratio(current, torch.zeros(5))
    assert logs[:2].tolist() == [-1.0, -MAX_LOG_RATIO] and logs[2:].isnan().all()
    logs[:2].sum().backward()
    assert current.grad.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("rollout", [math.inf, -math.inf, math.nan, -1e9])
def test_a_rollout_logprob_that_no_sample_can_have_counts_as_a_huge_ratio(rollout):
    assert behave_log_ratio(torch.tensor([-1.0]), torch.tensor([rollout])).tolist() == [MAX_LOG_RATIO]


def test_a_proximal_logprob_that_is_not_finite_counts_as_a_ratio_of_one():
    prox = torch.tensor([math.nan, -math.inf, -1.0], requires_grad=True)
    logs = behave_log_ratio(prox, torch.tensor([-1.0, -1.0, -0.5]))
    assert logs.tolist() == [0.0, 0.0, -0.5] and not logs.requires_grad


def test_k3_averages_to_the_divergence_over_the_old_policy():
    old, new = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    exact = sum(p * math.log(p / q) for p, q in zip(old.tolist(), new.tolist(), strict=True))
    estimates = k3(new.log(), old.log())
    assert (old * estimates).sum().item() == pytest.approx(exact, rel=1e-5)
    assert (estimates >= 0).all()


def test_the_bernoulli_divergence_is_exact_near_certainty_and_at_impossible_tokens():
    p, q = 1 - 1e-6, 1 - 3e-6
    exact = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    logs = torch.tensor([math.log(p)], dtype=torch.float64), torch.tensor([math.log(q)], dtype=torch.float64)
    assert bernoulli_kl(*logs).item() == pytest.approx(exact, rel=1e-6)
    minus = -math.inf
    certain = torch.tensor([0.0, minus, 0.0, minus, math.log(0.5), 1e-3])
    other = torch.tensor([0.0, minus, math.log(0.5), math.log(0.5), minus, 0.0])
    assert bernoulli_kl(certain, other).tolist() == pytest.approx([0.0, 0.0, math.log(2), math.log(2), math.inf, 0.0])
