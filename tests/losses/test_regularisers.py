"""Values and expected gradients of the regularisers; `test_compose` compares them with a slow version."""

import math

import pytest
import torch

from offbeat.losses.regularisers import regulariser
from offbeat.losses.targets import Targets

KINDS = ("k2", "k3", "ratio_k3", "entropy", "drift")


def term(kind, logprobs, *, anchor=None, ref=None, entropy=None, is_loss=None):
    other = logprobs.detach() if anchor is None else anchor
    everything = torch.ones(len(logprobs), dtype=torch.bool)
    targets = Targets(logprobs, other, other, other, torch.ones(len(logprobs)), everything, torch.zeros(0, dtype=torch.int64), {})
    return regulariser(kind, targets, everything if is_loss is None else is_loss, ref_logprobs=ref, entropy=entropy)


def test_values_by_hand():
    logprobs, ref = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert term("k2", logprobs, ref=ref).item() == pytest.approx(0.125)
    assert term("k3", logprobs, ref=ref).item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)
    anchor = torch.tensor([-1.2])
    assert term("ratio_k3", logprobs, ref=ref, anchor=anchor).item() == pytest.approx(math.exp(0.2) * (math.exp(-0.5) - 0.5))
    assert term("drift", logprobs, anchor=anchor).item() == pytest.approx(0.04)
    assert term("entropy", logprobs, entropy=torch.tensor([0.7])).item() == pytest.approx(-0.7)


@pytest.mark.parametrize(("kind", "forward"), [("k2", False), ("ratio_k3", False), ("k3", True)])
def test_expected_gradients_are_those_of_the_divergence_that_is_promised(kind, forward):
    """Over all tokens of a small vocabulary, each weighed by the probability with which it is sampled."""
    logits = torch.tensor([0.3, -0.4, 1.0, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.0, 0.5, 0.2, -0.3], dtype=torch.float64), 0)
    current = torch.log_softmax(logits, 0)
    exact = (ref.exp() * (ref - current)).sum() if forward else (current.exp() * (current - ref)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    sampled = current.detach().exp()
    (got,) = torch.autograd.grad((sampled * term(kind, current, ref=ref)).sum(), logits, retain_graph=True)
    torch.testing.assert_close(got, expected)
    if kind == "ratio_k3":  # off-policy, too
        rollout = torch.log_softmax(torch.tensor([0.9, 0.0, 0.0, 0.4], dtype=torch.float64), 0)
        estimate = (rollout.exp() * term(kind, current, ref=ref, anchor=rollout)).sum()
        torch.testing.assert_close(estimate, exact)
        torch.testing.assert_close(torch.autograd.grad(estimate, logits)[0], expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_masked_tokens_and_references_that_are_not_finite_add_nothing(kind, junk):
    logprobs = torch.tensor([-1.0, junk, -1.0], requires_grad=True)
    entropy = torch.tensor([0.5, junk, 0.5], requires_grad=True)
    known = torch.tensor([-1.2, junk, junk])
    got = term(kind, logprobs, anchor=known if kind == "drift" else torch.tensor([-1.2, junk, -1.0]), ref=known, entropy=entropy,
               is_loss=torch.tensor([True, False, True]))
    got.sum().backward()
    assert got.isfinite().all() and got[1] == 0
    leaf = entropy if kind == "entropy" else logprobs
    assert leaf.grad.isfinite().all() and leaf.grad[1] == 0 and leaf.grad[0] != 0
    assert kind == "entropy" or (got[2] == 0 and leaf.grad[2] == 0)


@pytest.mark.parametrize("kind", ["k2", "drift"])
def test_a_policy_far_away_is_still_pulled_back(kind):
    logprobs, far = torch.tensor([-90.0], requires_grad=True), torch.tensor([-1.0])
    term(kind, logprobs, ref=far, anchor=far).sum().backward()
    assert logprobs.grad.item() < -80


def test_k3_of_a_policy_far_away_is_finite():
    for kind in ("k3", "ratio_k3"):
        logprobs = torch.tensor([-900.0, -1.0], requires_grad=True)
        values = term(kind, logprobs, ref=torch.tensor([-1.0, -900.0]), anchor=torch.tensor([-1.0, -900.0]))
        values.sum().backward()
        assert values.isfinite().all() and logprobs.grad.isfinite().all()
