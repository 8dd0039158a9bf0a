"""The loss of a reward model against a plain loop in float64, far from 0, under any split, and its held-out metrics."""

import math

import numpy as np
import pytest
import torch

from offbeat.algorithms.reward_model import compare_rewards, reward_batch
from offbeat.data.packing import plan_microbatches
from offbeat.data.pairs import EncodedPair
from offbeat.losses.compose import target_losses

CENTRING = 0.01


def pairs(count: int = 7, *, seed: int = 0) -> list[EncodedPair]:
    """Random texts of unequal lengths with random margins; some share a beginning."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        start = rng.integers(0, 9, 3)
        texts = [np.concatenate([start, rng.integers(0, 9, rng.integers(1, 6))]).astype(np.int32) for _ in range(2)]
        sequences = tuple((text, np.arange(len(text)) == len(text) - 1) for text in texts)
        found.append(EncodedPair(sequences, (True, False), float(rng.random()) if number % 2 else 0.0, 3 if number % 3 else 0))
    return found


def slow(rewards: np.ndarray, margins: list[float], centring: float) -> tuple[float, np.ndarray]:
    """Loss and gradient."""
    loss, gradient = 0.0, np.zeros(len(rewards))
    for number, margin in enumerate(margins):
        c, j = float(rewards[2 * number]), float(rewards[2 * number + 1])
        x = c - j - margin
        loss += math.log1p(math.exp(-abs(x))) + max(-x, 0.0) + centring * (c + j) ** 2
        slope = -1 / (1 + math.exp(min(x, 700.0)))
        gradient[2 * number] = slope + 2 * centring * (c + j)
        gradient[2 * number + 1] = -slope + 2 * centring * (c + j)
    return loss / len(margins), gradient / len(margins)


def fast(rewards: np.ndarray, *, max_tokens: int = 1000, centring: float = CENTRING) -> tuple[float, np.ndarray]:
    """The same, in micro-batches."""
    batch = reward_batch(pairs(), centring=centring)
    plan = plan_microbatches(batch, num_ranks=2, max_tokens=max_tokens, share_prefix=True, whole_groups=True)
    values = torch.from_numpy(rewards).requires_grad_()
    total = sum(
        (target_losses(values[torch.from_numpy(np.sort(micro))], batch, np.sort(micro)).losses.sum()
         for micros in plan.microbatches for micro in micros), torch.zeros(()))
    (gradient,) = torch.autograd.grad(total, values)
    return float(total.detach()), gradient.numpy()


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("centring", [0.0, CENTRING])
def test_it_is_the_mean_over_pairs_however_large_rewards_are(scale: float, centring: float) -> None:
    rewards = (scale * np.random.default_rng(3).standard_normal(14)).astype(np.float32)
    loss, gradient = slow(rewards, [pair.margin for pair in pairs()], centring)
    found, found_gradient = fast(rewards, centring=centring)
    assert found == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(found_gradient, gradient, rtol=1e-4, atol=1e-6)


def test_any_split_that_keeps_pairs_whole_has_the_same_loss() -> None:
    rewards = np.random.default_rng(3).standard_normal(14).astype(np.float32)
    loss, gradient = fast(rewards)
    small_loss, small_gradient = fast(rewards, max_tokens=18)
    assert small_loss == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(small_gradient, gradient, rtol=1e-5)


def test_only_the_last_token_of_each_text_is_a_target() -> None:
    batch = reward_batch(pairs(), centring=CENTRING)
    np.testing.assert_array_equal(batch.positions, batch.offsets[1:] - 1)
    np.testing.assert_array_equal(batch.sequences["signs"], [1, -1] * 7)
    assert batch.columns["loss_weights"].tolist() == pytest.approx([1 / 14] * 14)
    assert len(reward_batch([], centring=CENTRING)) == 0


def test_its_report_and_the_evaluation_say_the_same() -> None:
    rewards = np.random.default_rng(4).standard_normal(14).astype(np.float32)
    batch = reward_batch(pairs(), centring=CENTRING)
    report = target_losses(torch.from_numpy(rewards), batch, np.arange(14), report=True).report.groups
    means = {name: float(values[where].double().mean()) for name, (values, where) in report.items()}
    outcome = compare_rewards(rewards)
    leads = rewards[::2].astype(np.float64) - rewards[1::2]
    assert (outcome.accuracy, outcome.margin) == ((leads > 0).mean(), pytest.approx(leads.mean()))
    assert means == pytest.approx({
        "reward_model/accuracy": outcome.accuracy, "reward_model/margin_mean": outcome.margin, "reward_model/reward_mean": outcome.reward})
    assert outcome.metrics() == {"eval/accuracy": outcome.accuracy, "eval/margin_mean": outcome.margin, "eval/reward_mean": outcome.reward}
