"""Adaptive coefficients, against the formulas of the papers in plain Python."""

import numpy as np
import pytest

from offbeat.algorithms.coefficients import KL_METRIC, Coefficients
from offbeat.algorithms.experience import reference_stats
from offbeat.algorithms.objectives import policy_loss
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data import wire
from offbeat.data.batch import Batch
from offbeat.telemetry.tracker import combine

KL = AlgorithmConfig(kl_loss="k3", kl_coefficient=0.1, reward_kl=0.02, kl_target=0.05, kl_horizon=20)
ENTROPY = AlgorithmConfig(entropy_target=0.2)


def test_without_a_target_nothing_changes_and_nothing_is_reported() -> None:
    config = AlgorithmConfig(kl_loss="k3", entropy_coefficient=0.1)
    start = Coefficients.of(config)
    assert start.applied(config) is config and start.as_metrics(config) == {}
    assert start.after({KL_METRIC: 9.0, "train/tokens": 5.0, "train/entropy": 0.0}, config) == start


def test_factors_of_the_divergence_follow_the_papers_formula() -> None:
    now, beta, reward = Coefficients.of(KL), 0.1, 0.02
    for divergence in np.random.default_rng(0).uniform(-0.05, 0.2, 50):
        now = now.after({KL_METRIC: float(divergence)}, KL)
        error = max(-0.2, min(0.2, (divergence - 0.05) / 0.05))
        beta, reward = beta * (1 + error / 20), reward * (1 + error / 20)
        assert (now.kl_loss, now.reward_kl) == pytest.approx((beta, reward))
        applied = now.applied(KL)
        assert (applied.kl_coefficient, applied.reward_kl) == (now.kl_loss, now.reward_kl)
        assert [term.coefficient for term in policy_loss(applied).regularisers] == [now.kl_loss]
        assert now.as_metrics(KL) == {"train/kl_coefficient": now.kl_loss, "train/reward_kl_coefficient": now.reward_kl}
    assert now.after({}, KL) == now, "no token was compared"


def test_the_entropy_bonus_follows_the_papers_rule() -> None:
    now, c = Coefficients.of(ENTROPY), 0.0
    previous = None
    for entropy in [0.15, 0.1, 0.05, 0.3, 0.19, 0.2, 0.5, 0.5, 0.5, 0.5, 0.5, 0.1]:
        alpha = c if previous is None or previous <= 0.2 else 0.0
        assert now.as_metrics(ENTROPY) == {"train/entropy_coefficient": pytest.approx(alpha)}
        assert [term.coefficient for term in policy_loss(now.applied(ENTROPY)).regularisers] == ([pytest.approx(alpha)] if alpha else [])
        now = now.after({"train/entropy": entropy, "train/tokens": 3.0}, ENTROPY)
        c, previous = max(c + 0.005 if entropy <= 0.2 else c - 0.005, 0.0), entropy
        assert (now.entropy, now.last_entropy) == (pytest.approx(c), entropy)
    assert c == 0.005
    assert now.after({"train/entropy": 0.0, "train/tokens": 0.0}, ENTROPY) == now, "a step without tokens says nothing"
    assert now.after({"train/tokens": 3.0}, ENTROPY) == now, "nor does the warm-up of a critic"


def test_a_checkpoint_goes_on_exactly_and_settings_that_are_not_adaptive_come_from_the_file() -> None:
    saved = wire.decode_json(Coefficients, wire.encode_json(Coefficients(0.123456789, 0.0333, 0.015, 0.17)))
    assert saved == Coefficients(0.123456789, 0.0333, 0.015, 0.17)
    both = AlgorithmConfig(**KL.model_dump() | {"entropy_target": 0.2})
    assert Coefficients.of(both, saved) == saved
    assert Coefficients.of(KL, saved) == Coefficients(0.123456789, 0.0333, 0.0)
    assert Coefficients.of(ENTROPY, saved) == Coefficients(ENTROPY.kl_coefficient, 0.0, 0.015, 0.17)
    assert Coefficients.of(both) == Coefficients.of(both, None) == Coefficients(0.1, 0.02, 0.0)


def batch(rollout, ref):
    num = len(rollout)
    return Batch.of_next_tokens(
        np.zeros(num + 1), np.arange(num + 1) > 0, lengths=[num + 1], losses=(), columns={
            name: np.concatenate([[0.0], values]) for name, values in (("rollout_logprobs", rollout), ("ref_logprobs", ref))})


def test_the_divergence_is_the_mean_over_the_targets_of_all_processes() -> None:
    rng = np.random.default_rng(1)
    rollout, ref = -rng.uniform(0, 3, (2, 30)).astype(np.float32)
    parts = [reference_stats(batch(rollout[a:b], ref[a:b])) for a, b in ((0, 7), (7, 7), (7, 30))]
    assert combine(parts).values() == pytest.approx({KL_METRIC: float(np.mean(rollout.astype(float) - ref))})
    assert combine(parts[1:2]).values() == {}


def test_differences_are_limited_and_those_of_unknown_logprobs_are_left_out() -> None:
    found = reference_stats(batch(np.array([-1.0, -np.inf, np.nan, -1.0]), np.array([-90.0, -1.0, -1.0, -2.0])))
    assert found.values() == {KL_METRIC: (20.0 + 1.0) / 2}
