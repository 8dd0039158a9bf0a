"""Behaviour weights and filters by hand; `test_compose` compares all of them with a slow version."""

import math

import numpy as np
import pytest
import torch

from offbeat.data.batch import FilterSpec, LossSpec, WeightSpec
from offbeat.losses.targets import Targets
from offbeat.losses.weights import constant_weights

PROX = torch.tensor([-1.0, -2.0, -0.5, -3.0])
ROLLOUT = torch.tensor([-1.0, -4.0, -0.9, -2.0])
INF = math.inf


def weights_of(*, prox=PROX, rollout=ROLLOUT, advantages=None, current=None, sequences=None, anchor="prox", m2_mask=None, **parts):
    count = len(prox)
    targets = Targets(
        prox if current is None else current, prox, rollout, prox, torch.ones(count) if advantages is None else advantages,
        torch.ones(count, dtype=torch.bool), torch.arange(count) if sequences is None else torch.tensor(sequences), {},
        num_sequences=count)
    return constant_weights(targets, LossSpec("ppo", anchor=anchor, own_samples=True, **parts), m2_mask=m2_mask)


def test_modes_treat_ratios_beyond_a_bound_as_they_say():
    ratios = [1.0, math.exp(2), math.exp(0.4), math.exp(-1)]
    for mode, expected in {
        "ratio": ratios, "clamp": [1.0, 5.0, ratios[2], 0.5], "mask": [1.0, 0.0, ratios[2], 0.0],
    }.items():
        found = weights_of(weight=WeightSpec(mode, "token", 0.5, 5.0))
        assert found.values.tolist() == pytest.approx(expected, rel=1e-6)
        assert found.masked["behave"].tolist() == [value == 0 for value in expected]


def test_a_weight_exactly_at_a_bound_is_kept_and_none_needs_no_weights():
    one = torch.zeros(1)
    assert weights_of(prox=one, rollout=one, weight=WeightSpec("mask", "token", 1.0, 1.0)).values.tolist() == [1.0]
    assert weights_of().values is None


@pytest.mark.parametrize("rollout", [INF, -INF, math.nan, -1e9])
@pytest.mark.parametrize(("mode", "expected"), [("mask", 0.0), ("clamp", 5.0)])
def test_a_rollout_logprob_that_no_sample_can_have_is_masked_or_capped_like_a_huge_ratio(rollout, mode, expected):
    found = weights_of(prox=torch.tensor([-1.0]), rollout=torch.tensor([rollout]), weight=WeightSpec(mode))
    assert found.values.tolist() == [expected]


@pytest.mark.parametrize("rollout", [INF, -INF, math.nan])
def test_without_a_cap_or_as_the_anchor_such_a_rollout_logprob_is_masked(rollout):
    tokens = {"prox": torch.tensor([-1.0, -1.0]), "rollout": torch.tensor([rollout, -1.0])}
    assert weights_of(**tokens, weight=WeightSpec("ratio")).values.tolist() == [0.0, 1.0]
    found = weights_of(**tokens, anchor="rollout")
    assert found.values.tolist() == [0.0, 1.0] and found.masked["behave"].tolist() == [True, False]


def test_levels_take_the_product_or_the_geometric_mean_over_a_sequence():
    prox = torch.log(torch.tensor([2.0, 4.0, 0.5]))
    tokens = {"prox": prox, "rollout": torch.zeros(3), "sequences": [0, 0, 1]}
    assert weights_of(**tokens, weight=WeightSpec("ratio", "sequence")).values.tolist() == pytest.approx([8, 8, 0.5])
    assert weights_of(**tokens, weight=WeightSpec("ratio", "geometric")).values.tolist() == pytest.approx([8**0.5, 8**0.5, 0.5])
    assert weights_of(**tokens, weight=WeightSpec("mask", "sequence", 0.6, 8.1)).values.tolist() == pytest.approx([8, 8, 0])


def test_long_sequences_have_finite_products():
    tokens = {"prox": torch.zeros(900), "rollout": torch.full((900,), -5.0), "sequences": [0] * 900}
    assert weights_of(**tokens, weight=WeightSpec("ratio", "sequence")).values.isfinite().all()


@pytest.mark.parametrize(("rule", "expected"), [
    (FilterSpec("ratio", high=2.0), [1, 0, 1, 1]),
    (FilterSpec("ratio", low=0.5), [1, 1, 1, 0]),
    (FilterSpec("k1", low=-1.0, high=0.4), [1, 0, 1, 1]),
    (FilterSpec("k2", high=0.5), [1, 0, 1, 1]),
    (FilterSpec("k3", high=0.3), [1, 0, 1, 0]),
    (FilterSpec("tv", low=-0.05), [1, 1, 1, 0]),
    (FilterSpec("tv", low=-0.05, high=0.12), [1, 1, 0, 0]),
    (FilterSpec("k1", "sequence", "mean", high=0.1), [0, 0, 1, 1]),
    (FilterSpec("k1", "sequence", "sum", low=-0.7), [1, 1, 1, 1]),
    (FilterSpec("k1", "sequence", "max", high=0.3), [0, 0, 0, 0]),
    (FilterSpec("ratio", "sequence", "mean", high=2.6), [0, 0, 1, 1]),
])
def test_filters_keep_what_is_within_their_bounds(rule, expected):
    prox = ROLLOUT + torch.tensor([0.0, 2.0, 0.375, -1.0])
    assert weights_of(prox=prox, filters=(rule,), sequences=[0, 0, 1, 1]).values.tolist() == expected


def test_k3_is_that_of_samples_of_the_rollout_policy_and_not_of_its_mirror():
    found = weights_of(prox=torch.tensor([-1.0, -1.0]), rollout=torch.tensor([-2.0, 0.0]), filters=(FilterSpec("k3", high=0.5),))
    assert found.values.tolist() == [0.0, 1.0], "exp(1) - 1 - 1 = 0.72, exp(-1) - 1 + 1 = 0.37"


def test_the_binary_divergence_is_the_larger_of_both_directions():
    prox, rollout = torch.log(torch.tensor([0.9, 0.1])), torch.log(torch.tensor([0.1, 0.9]))
    exact = 0.9 * math.log(9) + 0.1 * math.log(1 / 9)
    for high, kept in ((exact - 1e-4, 0), (exact + 1e-4, 1)):
        assert weights_of(prox=prox, rollout=rollout, filters=(FilterSpec("binary_kl", high=high),)).values.tolist() == [kept, kept]


def test_opsm_drops_targets_of_negative_advantage_in_sequences_that_the_current_policy_has_left():
    tokens = {"prox": torch.zeros(4), "rollout": torch.full((4,), -1.0), "sequences": [0, 0, 1, 1]}
    current, advantages = torch.tensor([-1.2, -2.0, -1.2, -1.6]), torch.tensor([-1.0, 1.0, -1.0, -1.0])
    found = weights_of(**tokens, current=current, advantages=advantages, filters=(FilterSpec("opsm", high=0.5),))
    assert found.values.tolist() == [0, 1, 1, 1] and found.masked["opsm"].tolist() == [True, False, False, False]


def test_the_filter_m2_takes_its_choice_from_the_column():
    rule = FilterSpec("m2", high=0.04)
    assert weights_of(filters=(rule,), m2_mask=torch.tensor([1.0, 0.0, 1.0, 0.0])).values.tolist() == [1, 0, 1, 0]
    with pytest.raises(AssertionError, match="choose_tokens"):
        weights_of(filters=(rule,))


def test_weights_and_filters_multiply_and_carry_no_gradient():
    prox = PROX.clone().requires_grad_()
    found = weights_of(
        prox=prox, weight=WeightSpec("clamp", high=5.0), filters=(FilterSpec("k1", high=1.0), FilterSpec("k1", low=-0.5)))
    assert found.values.tolist() == pytest.approx([1.0, 0.0, np.exp(np.float32(0.4)), 0.0], rel=1e-6)
    assert found.masked["k1"].tolist() == [False, True, False, True] and not found.values.requires_grad
