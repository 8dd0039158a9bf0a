"""Spreading a batch over the ranks, and learning from their times."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.algorithms.adam import AdamParams
from offbeat.config.root import Config
from offbeat.config.train import ParallelConfig
from offbeat.data.batch import Batch
from offbeat.data.cost import CostModel, prior
from offbeat.data.model_folder import read_model_config
from offbeat.data.packing import Plan, pack_row, plan_microbatches
from offbeat.errors import DataError
from offbeat.ranks import sharding
from offbeat.ranks.sharding import Sharder
from small_run import small_config
from train_samples import PPO, make_batch

PRIOR = CostModel(1e-3, 1e-6)
PARAMS = AdamParams(lr=1e-3)


def config_of(*, share: bool = True, balance: bool = True, max_tokens: int = 64) -> Config:
    return small_config(
        Path("runs"), train__max_tokens_per_microbatch=str(max_tokens), train__share_prefix=str(share).lower(),
        rollout__balance_batch=str(balance).lower())


def empty() -> Batch:
    return make_batch(1, 1).select([])


def skewed(lengths: list[int]) -> Batch:
    """Single sequences, each of which scores `length` tokens."""
    sizes = np.array(lengths) + 1
    trained = np.concatenate([np.arange(size) > 0 for size in sizes])
    return Batch.of_next_tokens(
        np.zeros(len(trained)), trained, lengths=sizes, columns={"loss_weights": trained / trained.sum()}, losses=(PPO,))


def sequences(batch: Batch) -> list[tuple]:
    """Each sequence with all that the loss needs."""
    found = []
    for i in range(len(batch)):
        one = batch.select([i])
        columns = [values.tolist() for _, values in sorted(one.columns.items())]
        found.append((one.tokens.tolist(), one.positions.tolist(), one.targets.tolist(), columns))
    return found


def squares(sharder: Sharder, batch: Batch) -> list[int]:
    """The sum of squared lengths that each rank gets of a batch."""
    shards = sharder.shards(batch, PARAMS, num_minibatches=1, seed=0)
    return [sum(int((pack_row(shard.batch.select(m), share_prefix=True).segments.lengths ** 2).sum()) for m in shard.minibatches[0])
            for shard in shards]


@settings(max_examples=60, deadline=None)
@given(
    num_groups=st.integers(0, 9), group_size=st.integers(1, 4), num_ranks=st.integers(1, 4), num_minibatches=st.integers(1, 3),
    share=st.booleans(), balance=st.booleans(), seed=st.integers(0, 1000))
def test_every_sequence_is_on_one_rank_once_within_the_budget(
    num_groups, group_size, num_ranks, num_minibatches, share, balance, seed
) -> None:
    batch = make_batch(num_groups, group_size, seed=seed) if num_groups else empty()
    shards = Sharder(config_of(share=share, balance=balance), num_ranks=num_ranks, prior=PRIOR).shards(
        batch, PARAMS, num_minibatches=num_minibatches, seed=seed)
    assert len(shards) == num_ranks
    assert sorted(s for shard in shards for s in sequences(shard.batch)) == sorted(sequences(batch))
    assert len({tuple(len(step) for step in shard.minibatches) for shard in shards}) == 1
    assert len(shards[0].minibatches) == max(min(num_minibatches, num_groups), 1)
    for shard in shards:
        used = [index for step in shard.minibatches for micro in step for index in micro.tolist()]
        assert sorted(used) == list(range(len(shard.batch)))
        for step in shard.minibatches:
            assert all(len(pack_row(shard.batch.select(micro), share_prefix=share)) <= 64 for micro in step)


@pytest.mark.parametrize("balance", [True, False])
def test_a_group_is_in_one_minibatch(balance: bool) -> None:
    shards = Sharder(config_of(balance=balance), num_ranks=2, prior=PRIOR).shards(make_batch(6, 3), PARAMS, num_minibatches=3, seed=1)
    prompts = []
    for step in range(3):
        own = [shard.batch.select(np.concatenate(shard.minibatches[step])) for shard in shards]
        prompts.append({tuple(s[0][:5]) for part in own for s in sequences(part)})
    assert [len(p) for p in prompts] == [2, 2, 2]
    assert len(set.union(*prompts)) == 6


def test_the_figures_of_a_step_are_those_worked_out_by_hand() -> None:
    # In order, ranks get 10 + 20 and 30 + 100 tokens; balanced, 60 and 100, which the longest sequence alone makes optimal.
    sharder = Sharder(config_of(max_tokens=1000), num_ranks=2, prior=CostModel(1.0, 0.0, 10.0))
    sharder.shards(skewed([10, 20, 30, 100]), PARAMS, num_minibatches=1, seed=0)
    figures = sharder.observe([1.0, 3.0])
    assert figures == pytest.approx({
        "balance/gap": 0.0, "balance/cov_before": 50 / 80, "balance/cov_after": 20 / 80, "balance/predicted_gain": 140 / 110,
        "balance/lost_s": 1.0})


def test_the_next_step_is_spread_ahead_and_observed_after_the_one_in_training() -> None:
    first, second = skewed([10, 20, 30, 100]), skewed([40, 40, 40, 40])
    plain, early = (Sharder(config_of(max_tokens=1000), num_ranks=2, prior=CostModel(1.0, 0.0, 10.0)) for _ in range(2))
    expected = []
    for batch in (first, second):
        plain.shards(batch, PARAMS, num_minibatches=1, seed=0)
        expected.append(plain.observe([1.0, 1.0])["balance/gap"])
    early.shards(first, PARAMS, num_minibatches=1, seed=0)
    early.shards(second, PARAMS, num_minibatches=1, seed=0, ahead=True)
    assert [early.observe([1.0, 1.0])["balance/gap"] for _ in range(2)] == pytest.approx(expected)
    early.shards(first, PARAMS, num_minibatches=1, seed=0)
    early.shards(second, PARAMS, num_minibatches=1, seed=0, ahead=True)  # which nobody trains on
    early.observe([1.0, 1.0])
    early.shards(first, PARAMS, num_minibatches=1, seed=0)
    assert early.observe([1.0, 1.0])["balance/gap"] == pytest.approx(expected[0])


def test_a_step_that_is_observed_while_the_next_one_is_spread_changes_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = skewed([10, 20, 30, 100]), make_batch(6, 3)
    sharder, again = (Sharder(config_of(max_tokens=1000), num_ranks=2, prior=CostModel(1.0, 0.0, 10.0)) for _ in range(2))
    costs: list[CostModel] = []

    def plan(batch: Batch, *, cost: CostModel, **settings: Any) -> Plan:
        if len(costs) == 1:
            sharder.observe([100.0, 9.0])
        costs.append(cost)
        return plan_microbatches(batch, cost=cost, **settings)

    sharder.shards(first, PARAMS, num_minibatches=1, seed=0)
    monkeypatch.setattr(sharding, "plan_microbatches", plan)
    shards = sharder.shards(second, PARAMS, num_minibatches=3, seed=0, ahead=True)
    assert len(set(costs)) == 1 and sharder.cost != costs[0], "the observed times have changed the model"
    sharder.observe([1.0, 1.0])
    assert sharder.balanced_by == costs[0], "by which the step can be computed again"
    monkeypatch.undo()
    again.balance_by(sharder.balanced_by)
    for mine, other in zip(shards, again.shards(second, PARAMS, num_minibatches=3, seed=0), strict=True):
        assert sequences(mine.batch) == sequences(other.batch)


def test_unbalanced_shares_are_reported_as_they_are() -> None:
    sharder = Sharder(config_of(max_tokens=1000, balance=False), num_ranks=2, prior=CostModel(1.0, 0.0))
    sharder.shards(skewed([10, 20, 30, 100]), PARAMS, num_minibatches=1, seed=0)
    figures = sharder.observe([1.0, 1.0])
    assert figures == pytest.approx({
        "balance/gap": 0.3, "balance/cov_before": 50 / 80, "balance/cov_after": 50 / 80, "balance/predicted_gain": 1.0,
        "balance/lost_s": 0.0})


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("num_groups", [7, 1, 0])
def test_a_batch_is_scored_in_the_micro_batches_in_which_it_is_trained_on(num_groups: int, balance: bool) -> None:
    batch = make_batch(num_groups, 3) if num_groups else empty()
    sharder = Sharder(config_of(balance=balance), num_ranks=2, prior=PRIOR)
    shards = sharder.shards(batch, PARAMS, num_minibatches=1, seed=0)
    shares = sharder.score_shares(batch, of="reference", with_entropy=True)
    assert sorted(np.concatenate([share.sequences for share in shares]).tolist()) == list(range(len(batch)))
    for share, shard in zip(shares, shards, strict=True):
        assert (share.of, share.with_entropy) == ("reference", True)
        assert [micro.tolist() for micro in share.microbatches] == [micro.tolist() for micro in shard.minibatches[0]]
        assert np.array_equal(share.batch.tokens, shard.batch.tokens)
        assert np.array_equal(share.batch.targets, batch.select(share.sequences).targets)
    assert np.isfinite(list(sharder.observe([0.1, 0.2]).values())).all(), "scoring is no step"


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("num_groups", [7, 1, 0])
def test_any_number_of_groups_goes_over_four_ranks(num_groups: int, balance: bool) -> None:
    batch = make_batch(num_groups, 3) if num_groups else empty()
    sharder = Sharder(config_of(balance=balance), num_ranks=4, prior=PRIOR)
    shards = sharder.shards(batch, PARAMS, num_minibatches=1, seed=0)
    assert sum(len(shard.batch) for shard in shards) == 3 * num_groups
    assert len({len(shard.minibatches[0]) for shard in shards}) == 1
    figures = sharder.observe([0.1] * 4)
    assert all(np.isfinite(value) for value in figures.values())
    assert figures["balance/predicted_gain"] > 0.999 and figures["balance/gap"] > -1e-9


def test_measured_times_change_how_the_next_step_is_spread() -> None:
    """By the prior time goes by tokens; these ranks spend it on pairs of tokens alone."""
    sharder = Sharder(config_of(max_tokens=10_000), num_ranks=2, prior=CostModel(1.0, 1e-3))
    one_long = skewed([300] + [30] * 20)
    assert sorted(squares(sharder, one_long)) != [20 * 30**2, 300**2]
    rng = np.random.default_rng(0)
    for _ in range(30):
        lengths = rng.lognormal(4, 0.9, 12).astype(int).clip(4, 900).tolist()
        sharder.observe([1e-6 * each for each in squares(sharder, skewed(lengths))])
    assert sharder.cost.quadratic == pytest.approx(1e-6, rel=0.05)
    assert sorted(squares(sharder, one_long)) == [20 * 30**2, 300**2]


def test_a_sharder_starts_from_the_sizes_of_its_model(model_dir: str) -> None:
    sharder = Sharder.of(config_of(), model=model_dir, num_ranks=2)
    assert sharder.cost == prior(read_model_config(model_dir))


def test_times_that_do_not_fit_the_ranks_are_refused() -> None:
    sharder = Sharder(config_of(), num_ranks=2, prior=PRIOR)
    for times in ([1.0], [1.0, float("nan")], [1.0, -1.0]):
        sharder.shards(make_batch(2, 2), PARAMS, num_minibatches=1, seed=0)
        with pytest.raises(DataError, match="busy_s must be 2 finite times"):
            sharder.observe(times)
    with pytest.raises(AssertionError, match="observe follows shards"):
        sharder.observe([1.0, 1.0])


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}])
def test_ranks_that_compute_the_same_rows_are_given_the_same_share(sizes: dict) -> None:
    batch, config = make_batch(6, 3), config_of()
    plain = Sharder(config.for_ranks, num_ranks=2, prior=PRIOR)
    divided = config.train.model_copy(update={"parallel": ParallelConfig(**sizes)})
    grouped = Sharder(config.model_copy(update={"train": divided}), num_ranks=4, prior=PRIOR)
    expected = plain.shards(batch, PARAMS, num_minibatches=2, seed=1)
    shards = grouped.shards(batch, PARAMS, num_minibatches=2, seed=1)
    assert [shard is shards[2 * (rank // 2)] for rank, shard in enumerate(shards)] == [True] * 4
    for share, shard in zip(expected, shards[::2], strict=True):
        assert sequences(share.batch) == sequences(shard.batch)
    assert grouped.observe([1.0, 2.0, 3.0, 3.5]) == plain.observe([2.0, 3.5]), "a share takes as long as the busiest of its ranks"
    scored = grouped.score_shares(batch, of="policy", with_entropy=False)
    assert scored[0] is scored[1] and scored[2] is scored[3] and len(scored) == 4
