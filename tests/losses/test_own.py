"""Objectives from a file: what they see, and that their losses and gradients equal those of a slow version under any split."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from offbeat.algorithms.objectives import policy_loss
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.batch import FilterSpec, RegulariserSpec, WeightSpec
from offbeat.errors import CodeError, OwnCodeError
from offbeat.losses.compose import target_losses
from offbeat.losses.own_check import check_objective
from slow_losses import random_batch
from waits import DEVICE, HostWaits

FILE = Path(__file__).parents[1] / "support" / "own_losses.py"


def own(function, *, reads=(), **parts):
    loss = policy_loss(AlgorithmConfig(objective=f"{FILE}:{function}", weight="none", constants={"low": 0.8, "high": 1.2}))
    return replace(loss, reads=reads, **parts)


def computed(batch, logprobs, index=None, entropy=None):
    """[m] losses, and their gradients by log-probability and, if it is given, entropy; float64."""
    index = np.arange(batch.num_targets) if index is None else index
    leaf = torch.tensor(logprobs[index], dtype=torch.float64, requires_grad=True)
    given = None if entropy is None else torch.tensor(entropy[index], dtype=torch.float64, requires_grad=True)
    found = target_losses(leaf, batch, index, entropy=given, report=True)
    found.losses.sum().backward()
    return found.losses.detach(), leaf.grad, None if given is None else given.grad, found.report


def slow_clipped(batch, logprobs, weight=lambda m: 1.0):
    """PPO-clip, target by target."""
    losses, gradients = [], []
    for m in range(batch.num_targets):
        a, prox = float(batch.columns["advantages"][m]), float(batch.columns["prox_logprobs"][m])
        scale = float(batch.columns["loss_weights"][m]) * weight(m)
        ratio = math.exp(min(max(float(logprobs[m]) - prox, -20), 20))
        stops = (a > 0 and ratio > 1.2) or (a < 0 and ratio < 0.8)
        losses.append(scale * -a * (min(max(ratio, 0.8), 1.2) if stops else ratio))
        gradients.append(0.0 if stops else scale * -a * ratio)
    return torch.tensor(losses).double(), torch.tensor(gradients).double()


@pytest.mark.parametrize("seed", range(3))
def test_an_own_loss_and_its_gradient_equal_the_slow_version(seed) -> None:
    batch, logprobs = random_batch(own("clipped"), seed=seed, equal_advantages=False)
    batch.columns["loss_weights"][[1, 4, 9]] = 0.0
    losses, gradient, _, _ = computed(batch, logprobs)
    expected = slow_clipped(batch, logprobs)
    torch.testing.assert_close((losses, gradient), expected, rtol=2e-5, atol=1e-9)
    assert not losses[[1, 4, 9]].any() and not gradient[[1, 4, 9]].any()


def test_weights_filters_and_regularisers_go_with_an_own_objective() -> None:
    weights, terms = WeightSpec("mask", high=1.3), (RegulariserSpec("k2", 0.5),)
    loss = own("clipped", weight=weights, filters=(FilterSpec("clip_cov"),), regularisers=terms)
    batch, logprobs = random_batch(loss, seed=3)
    w = np.exp(batch.columns["prox_logprobs"].astype(np.float64) - batch.columns["rollout_logprobs"])

    def weight(m):
        return w[m] if w[m] <= 1.3 and batch.columns["detach_mask"][m] else 0.0

    losses, gradient, _, _ = computed(batch, logprobs)
    expected, slope = slow_clipped(batch, logprobs, weight)
    d = torch.tensor(logprobs.astype(np.float64) - batch.columns["ref_logprobs"])
    a = torch.tensor(batch.columns["loss_weights"])
    torch.testing.assert_close((losses, gradient), (expected + a * 0.25 * d**2, slope + a * 0.5 * d), rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("function", ["clipped", "geometric", "everything"])
def test_no_split_changes_losses_gradients_or_metrics(function) -> None:
    reads = ("ref_logprobs", "entropy") if function == "everything" else ()
    batch, logprobs = random_batch(own(function, reads=reads), seed=4, equal_advantages=False)
    entropy = np.random.default_rng(0).uniform(0, 2, batch.num_targets) if reads else None
    *whole, report = computed(batch, logprobs, entropy=entropy)
    for cuts in ((0, 3, 7), (0, 1, 2, 3, 4, 5, 6, 7), (0, 4, 4, 7)):
        parts = [
            computed(batch, logprobs, np.arange(batch.target_offsets[a], batch.target_offsets[b]), entropy)
            for a, b in pairwise(cuts)]
        for got, expected in zip(zip(*parts, strict=True), whole, strict=False):
            if expected is not None:
                assert torch.equal(torch.cat(got), expected)
        for name, values in report.means.items():
            if name.startswith("own/"):
                assert torch.equal(torch.cat([part[3].means[name] for part in parts]), values)


def test_an_own_loss_sees_only_tokens_that_count_whatever_the_others_hold() -> None:
    batch, logprobs = random_batch(own("geometric"), seed=5)
    masked = np.arange(batch.num_targets) % 3 == 1
    batch.columns["loss_weights"][masked] = 0.0
    expected = computed(batch, logprobs)
    for junk in (math.nan, math.inf, -math.inf, 1e30):
        poisoned = batch.with_columns(**{
            name: np.where(masked, junk, values) for name, values in batch.columns.items() if name != "loss_weights"})
        got = computed(poisoned, np.where(masked, junk, logprobs))
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1]) and got[1].isfinite().all()


def test_an_own_loss_sees_tokens_of_advantage_0_and_whole_sequences() -> None:
    batch, logprobs = random_batch(own("squared"), seed=6)
    idle = batch.columns["advantages"] == 0
    losses, gradient, _, _ = computed(batch, logprobs)
    assert idle.any() and losses[idle].all() and gradient[idle].all()
    losses, *_ = computed(replace(batch, losses=(own("counting"),)), logprobs)
    counts = np.diff(batch.target_offsets)[batch.target_sequences]
    assert (losses / torch.tensor(batch.columns["loss_weights"])).tolist() == pytest.approx(counts.tolist())


@pytest.mark.parametrize("function", ["clipped", "geometric", "everything"])
def test_an_own_loss_never_waits_for_the_device_even_if_tokens_are_filtered(function) -> None:
    reads = ("ref_logprobs", "entropy") if function == "everything" else ()
    loss = own(function, reads=reads, weight=WeightSpec("mask", high=1.3), filters=(FilterSpec("clip_cov"),))
    batch, _ = random_batch(loss)
    logprobs, entropy = (torch.zeros(batch.num_targets, device=DEVICE, requires_grad=True) for _ in range(2))
    with HostWaits() as waits:
        target_losses(logprobs, batch, np.arange(batch.num_targets), entropy=entropy, report=True).losses.sum().backward()
    assert waits.found == [] and logprobs.grad.device == DEVICE


def test_metrics_are_reported_by_name_also_where_there_are_no_tokens() -> None:
    batch, logprobs = random_batch(own("clipped"), seed=1)
    *_, report = computed(batch, logprobs)
    assert 0 < report.means["own/clipped"].mean() < 1
    *_, of_nothing = computed(batch, logprobs, np.zeros(0, np.int64))
    assert {name for name in of_nothing.means if name.startswith("own/")} == {"own/clipped"}
    assert of_nothing.means["own/clipped"].shape == (0,)
    everything_masked = batch.with_columns(loss_weights=np.zeros(batch.num_targets))
    losses, gradient, _, report = computed(everything_masked, logprobs)
    assert not losses.any() and not gradient.any() and not report.means["own/clipped"].any()


@pytest.mark.parametrize(("function", "sentence"), [
    ("bad_shape", "must return losses of shape (28,), one for each token, got shape ()"),
    ("bad_metric", "must return metric x of shape (28,), one for each token, got 1.0 (float)"),
    ("bare", "must return TokenLosses(losses), got shape (28,)"),
    ("raises", f"raised KeyError: 'missing' at {FILE}, line "),
    ("fickle", "must return the same metrics at every call, got n28 after n1"),
])
def test_what_is_wrong_with_an_own_loss_is_said_in_a_sentence_with_its_file(function, sentence) -> None:
    batch, logprobs = random_batch(own(function), lengths=(9, 9, 10))
    with pytest.raises(OwnCodeError) as caught:
        computed(batch, logprobs)
    assert f"objective '{FILE}:{function}' {sentence}" in str(caught.value)
    lines = FILE.read_text().splitlines()
    if function == "raises":
        assert "missing" in lines[int(str(caught.value).rpartition("line ")[2]) - 1]


def test_a_name_that_is_not_there_is_refused() -> None:
    batch, logprobs = random_batch(own("cliped"))
    with pytest.raises(CodeError, match="did you mean 'clipped'"):
        computed(batch, logprobs)


def test_the_example_vespo_equals_its_formula() -> None:
    file = Path(__file__).parents[2] / "examples" / "vespo.py"
    settings = AlgorithmConfig(objective=f"{file}:vespo", anchor="rollout", weight="none", constants={"lam_loss": 2.5})
    check_objective(policy_loss(settings), name="vespo", drops=True)
    batch, logprobs = random_batch(policy_loss(settings), seed=2, spread=0.1)
    losses, gradient, _, report = computed(batch, logprobs)
    a, sequences = batch.columns["advantages"].astype(np.float64), batch.target_sequences
    gaps = logprobs.astype(np.float64) - batch.columns["rollout_logprobs"]
    w = np.exp([gaps[sequences == sequence].sum() for sequence in sequences])
    k, lam = np.where(a >= 0, 2.0, 3.0), np.where(a >= 0, 3.0, 2.5)
    slope = -np.exp(lam) * w**k * np.exp(-lam * w) * a * batch.columns["loss_weights"]
    np.testing.assert_allclose(gradient, slope, rtol=2e-5, atol=1e-9)
    np.testing.assert_allclose(losses, slope * logprobs, rtol=2e-5, atol=1e-9)
    assert report.means["own/weight"].shape == (batch.num_targets,)
