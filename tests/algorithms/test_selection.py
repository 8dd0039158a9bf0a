"""What M2PO, Clip-Cov and KL-Cov choose from a whole batch, against slow versions in plain Python."""

import math

import numpy as np
import pytest

from offbeat.algorithms.objectives import policy_loss
from offbeat.algorithms.selection import choose_tokens
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.batch import Batch, FilterSpec, LossSpec, RegulariserSpec
from slow_losses import random_batch

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
    chosen = choose_tokens(loss, of_targets(rollout, advantages, weights), prox_logprobs=prox, seed=0)
    assert list(chosen) == ["m2_mask"] and chosen["m2_mask"].dtype == np.float32
    return chosen["m2_mask"].tolist()


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


def test_no_tokens_and_losses_without_such_a_filter_choose_nothing() -> None:
    assert choose(0.04, prox=np.zeros(0), rollout=np.zeros(0), advantages=np.zeros(0)) == []
    assert choose_tokens(policy_loss(AlgorithmConfig()), of_targets(ROLLOUT, ADVANTAGES, ADVANTAGES), prox_logprobs=PROX, seed=0) == {}


# -- covariance ------------------------------------------------------------------------------------------------------------------------


def clip_cov(anchor="prox", share=0.1, low=0.2, high=2.0):
    return policy_loss(AlgorithmConfig(
        cov_control="clip", cov_share=share, cov_low=low, cov_high=high, anchor=anchor, weight="none" if anchor == "rollout" else "mask"))


def kl_cov(share=0.1):
    return policy_loss(AlgorithmConfig(cov_control="kl", objective="importance_sampling", cov_share=share, num_minibatches=2))


def batch_of(loss, seed=0):
    """90 targets, some of weight 0, with proximal log-probabilities [90]."""
    batch, _ = random_batch(loss, lengths=(30, 1, 20, 25, 14), seed=seed, equal_advantages=False)
    batch.columns["loss_weights"][np.random.default_rng(seed).integers(0, 90, 6)] = 0
    return batch, batch.columns["prox_logprobs"]


def slow_covariances(batch, prox):
    counted = [m for m in range(batch.num_targets) if batch.columns["loss_weights"][m] != 0]
    a = [float(value) for value in batch.columns["advantages"]]
    mean_a, mean_lp = (sum(float(values[m]) for m in counted) / len(counted) for values in (a, prox))
    return {m: (a[m] - mean_a) * (float(prox[m]) - mean_lp) for m in counted}


def chosen_by(loss, batch, prox, seed=0):
    ((name, mask),) = choose_tokens(loss, batch, prox_logprobs=prox, seed=seed).items()
    return name, set(np.flatnonzero(mask == (0 if name == "detach_mask" else 1)).tolist())


@pytest.mark.parametrize("anchor", ["prox", "rollout"])
def test_clip_cov_drops_a_random_share_of_the_targets_within_its_bounds_that_are_not_clipped_already(anchor) -> None:
    loss, clipped_some, seen = clip_cov(anchor), False, set()
    for seed in range(6):
        batch, prox = batch_of(loss, seed)
        values = slow_covariances(batch, prox)
        within = {m for m, value in values.items() if 0.2 < value < 2.0}
        a, ratio = batch.columns["advantages"], np.exp(prox - batch.columns["rollout_logprobs"])
        clipped = {m for m in within if (a[m] > 0 and ratio[m] > 1.2) or (a[m] < 0 and ratio[m] < 0.8)} if anchor == "rollout" else set()
        eligible = within - clipped
        clipped_some |= bool(clipped)
        for draw in range(12):
            name, dropped = chosen_by(loss, batch, prox, seed=draw)
            assert name == "detach_mask" and dropped <= eligible and len(dropped) == min(int(0.1 * len(values)), len(eligible))
            assert (name, dropped) == chosen_by(loss, batch, prox, seed=draw), "equal seeds choose alike"
            seen |= {(seed, m) for m in dropped}
        assert {m for s, m in seen if s == seed} == eligible, "every eligible target is drawn at some time"
    assert clipped_some == (anchor == "rollout")


def test_kl_cov_chooses_the_targets_of_the_largest_covariance() -> None:
    for seed in range(6):
        batch, prox = batch_of(kl_cov(), seed)
        values = slow_covariances(batch, prox)
        highest = sorted(values, key=lambda m: -values[m])[:int(0.1 * len(values))]
        assert chosen_by(kl_cov(), batch, prox) == ("kl_cov_mask", set(highest))


@pytest.mark.parametrize("loss", [clip_cov(share=1e-4, low=-9.0, high=9.0), kl_cov(share=1e-4)])
def test_at_least_one_target_is_chosen_and_none_of_none(loss) -> None:
    batch, prox = batch_of(loss)
    assert len(chosen_by(loss, batch, prox)[1]) == 1
    nothing = batch.select([])
    assert chosen_by(loss, nothing, nothing.columns["prox_logprobs"])[1] == set()


@pytest.mark.parametrize("junk", [math.nan, -math.inf])
@pytest.mark.parametrize("loss", [clip_cov(share=1.0, low=-9.0, high=9.0), kl_cov(share=1.0)])
def test_targets_without_a_weight_or_a_finite_logprob_are_neither_counted_nor_chosen(loss, junk) -> None:
    batch, prox = batch_of(loss)
    masked = batch.columns["loss_weights"] == 0
    expected = chosen_by(loss, batch, prox)
    assert expected[1] == set(np.flatnonzero(~masked).tolist())
    assert chosen_by(loss, batch, np.where(masked, junk, prox)) == expected
    holed = prox.copy()
    holed[0] = junk
    assert not masked[0] and chosen_by(loss, batch, holed)[1] == expected[1] - {0}


def test_no_split_into_ranks_or_micro_batches_changes_what_is_chosen() -> None:
    """The choice is a column of the batch, so a part takes its own with it."""
    loss = kl_cov()
    batch, prox = batch_of(loss)
    whole = batch.with_columns(**choose_tokens(loss, batch, prox_logprobs=prox, seed=0))
    parts = [whole.select([0, 2]), whole.select([1, 3, 4])]
    assert sum(part.columns["kl_cov_mask"].sum() for part in parts) == whole.columns["kl_cov_mask"].sum() == 8
    assert [RegulariserSpec("kl_cov", 1.0, 0.1)] == list(loss.regularisers)
