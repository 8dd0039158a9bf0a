"""M2PO's choice, against a loop that drops one harmful token after the other."""

import math

import numpy as np
import pytest

from offbeat.algorithms.objectives import policy_loss
from offbeat.algorithms.selection import choose_tokens
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.batch import Batch, FilterSpec, LossSpec

ROLLOUT = np.zeros(6)
PROX = np.array([0.1, 0.3, -0.5, 0.9, -0.2, 0.7])
ADVANTAGES = np.array([1.0, 1.0, -1.0, -1.0, -1.0, 0.0])  # the fourth moves back, the last has no direction


def m2(*limits):
    return LossSpec("importance_sampling", filters=tuple(FilterSpec("m2", high=limit) for limit in limits), own_samples=True)


def of_targets(rollout, advantages, weights):
    """A batch of one sequence of these targets."""
    num = len(rollout)
    return Batch.of_next_tokens(
        np.zeros(num + 1), np.arange(num + 1) > 0, lengths=[num + 1], losses=(), columns={
            name: np.concatenate([[0.0], values])
            for name, values in (("rollout_logprobs", rollout), ("advantages", advantages), ("loss_weights", weights))})


def choose(limit, *, prox=PROX, rollout=ROLLOUT, advantages=ADVANTAGES, loss_weights=None):
    loss = m2(limit) if isinstance(limit, float) else m2(*limit)
    weights = np.ones(len(prox)) if loss_weights is None else loss_weights
    return choose_tokens(loss, of_targets(rollout, advantages, weights), prox_logprobs=prox).tolist()


@pytest.mark.parametrize(("limit", "kept"), [
    (math.inf, [1, 1, 1, 1, 1, 1]),
    (0.0975, [1, 1, 1, 1, 1, 1]),  # mean of .01, .04, .09 and .25
    (0.097, [1, 1, 0, 1, 1, 1]),
    (0.04, [1, 0, 0, 1, 1, 1]),
    (0.02, [1, 0, 0, 1, 0, 1]),
    (0.0, [0, 0, 0, 1, 0, 1]),
])
def test_the_largest_harmful_moves_are_dropped_until_their_mean_square_is_low_enough(limit, kept) -> None:
    assert choose(limit) == kept


def slow(prox, rollout, advantages, weights, limit):
    kept = [True] * len(prox)
    while True:
        squares = {
            m: (prox[m] - rollout[m]) ** 2 for m in range(len(prox))
            if kept[m] and weights[m] and (prox[m] - rollout[m]) * advantages[m] > 0}
        if not squares or sum(squares.values()) / len(squares) <= limit:
            return [float(keep) for keep in kept]
        kept[max(squares, key=lambda m: squares[m])] = False


def test_random_tokens_are_chosen_as_by_the_loop_in_any_order_and_weight() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        prox, rollout, advantages = rng.standard_normal((3, 40))
        weights = rng.integers(0, 2, 40)
        kept = choose(0.04, prox=prox, rollout=rollout, advantages=advantages, loss_weights=weights)
        assert kept == slow(prox, rollout, advantages, weights, 0.04)
        order = rng.permutation(40)
        moved = choose(0.04, prox=prox[order], rollout=rollout[order], advantages=advantages[order], loss_weights=weights[order])
        assert moved == np.array(kept)[order].tolist()


def test_equal_moves_are_dropped_together_and_several_limits_hold_at_once() -> None:
    assert choose(0.03, prox=np.array([0.1, 0.3, 0.3]), rollout=np.zeros(3), advantages=np.ones(3)) == [1, 0, 0]
    assert choose((0.097, 0.04)) == choose(0.04)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_rollout_logprob_that_is_not_finite_counts_as_a_huge_move_up(value) -> None:
    rollout = np.array([0.0, value, value, 0.0])
    assert choose(0.04, prox=np.zeros(4), rollout=rollout, advantages=np.array([1.0, 1.0, -1.0, 1.0])) == [1, 0, 1, 1]


def test_no_tokens_and_losses_without_such_a_filter_keep_everything() -> None:
    assert choose(0.04, prox=np.zeros(0), rollout=np.zeros(0), advantages=np.zeros(0)) == []
    loss = policy_loss(AlgorithmConfig())
    kept = choose_tokens(loss, of_targets(ROLLOUT, ADVANTAGES, ADVANTAGES), prox_logprobs=PROX)
    assert kept.dtype == np.float32 and kept.all()
