"""What is reported of a loss's targets, by hand."""

import math

import pytest
import torch

from offbeat.data.batch import FilterSpec, LossSpec, WeightSpec
from offbeat.losses.metrics import policy_report
from offbeat.losses.targets import Targets
from offbeat.losses.weights import constant_weights

PROX, ROLLOUT, REF = (torch.log(torch.tensor(values)) for values in ([0.2, 0.4, 0.5], [0.1, 0.4, 0.05], [0.2, 0.1, 0.3]))
CURRENT = torch.log(torch.tensor([0.3, 0.4, 0.2])).requires_grad_()
GRPO = LossSpec(
    "ppo", {"clip_low": 0.8, "clip_high": 1.2, "dual_clip": 0.0}, anchor="prox", weight=WeightSpec("mask"), own_samples=True)


def report(loss, **columns):
    targets = Targets(
        CURRENT, PROX, ROLLOUT, PROX, torch.tensor([1.0, -1.0, -1.0]), torch.ones(3, dtype=torch.bool), torch.arange(3), loss.constants,
        num_sequences=3)
    weights = constant_weights(targets, loss)
    return policy_report(targets, loss, weights, ref_logprobs=columns.get("ref"))


def mean(values):
    return values.double().mean().item()


def test_ratios_clips_weights_and_divergences_are_reported():
    found = report(GRPO)
    expected = {
        "train/clip_fraction": 2 / 3, "train/clip_high_fraction": 1 / 3, "train/clip_low_fraction": 1 / 3,
        "policy/ratio_mean": (1.5 + 1 + 0.4) / 3, "policy/behave_masked_fraction": 1 / 3, "policy/masked_fraction": 1 / 3,
        "policy/weight_mean": (2 + 1 + 0) / 3, "policy/weight_square_mean": (4 + 1 + 0) / 3,
        "policy/kl_rollout_to_current_k1_mean": -(math.log(3) + 0 + math.log(4)) / 3,
        "policy/kl_rollout_to_current_k3_mean": (3 - 1 - math.log(3) + 4 - 1 - math.log(4)) / 3,
        "policy/kl_rollout_to_prox_k3_mean": (2 - 1 - math.log(2) + 10 - 1 - math.log(10)) / 3,
        "policy/logprob_gap_mean": (math.log(2) + math.log(10)) / 3}
    expected["policy/kl_mean"] = expected["policy/kl_rollout_to_current_k3_mean"]
    assert {name: mean(values) for name, values in found.means.items()} == pytest.approx(expected, rel=1e-5)
    assert {name: values.max().item() for name, values in found.maxima.items()} == pytest.approx(
        {"policy/ratio_max": 1.5, "policy/weight_max": 2.0, "policy/logprob_gap_max": math.log(10)}, rel=1e-5)
    assert {name: values.min().item() for name, values in found.minima.items()} == pytest.approx({"policy/ratio_min": 0.4}, rel=1e-5)
    assert not any(values.requires_grad for part in (found.means, found.minima, found.maxima) for values in part.values())


def test_the_reference_each_filter_and_the_gate_have_metrics_where_a_loss_has_them():
    found = report(LossSpec("sapo", {"tau_low": 1.0, "tau_high": 1.0}, anchor="prox", filters=(FilterSpec("k2", high=1.0),)), ref=REF)
    d = [math.log(0.3 / 0.2), math.log(0.4 / 0.1), math.log(0.2 / 0.3)]
    assert mean(found.means["policy/kl_current_to_ref_k1_mean"]) == pytest.approx(sum(d) / 3, rel=1e-5)
    assert mean(found.means["policy/kl_current_to_ref_k3_mean"]) == pytest.approx(sum(math.exp(-x) - 1 + x for x in d) / 3, rel=1e-5)
    assert found.means["policy/k2_masked_fraction"].tolist() == found.means["policy/masked_fraction"].tolist() == [False, False, True]
    assert not found.means["policy/behave_masked_fraction"].any() and not found.means["train/clip_fraction"].any()
    assert found.means["policy/gate_mean"][1] == 1.0
