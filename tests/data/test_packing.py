import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.data.batch import Batch, SharedPrompts
from offbeat.data.cost import CostModel, run_work
from offbeat.data.packing import find_prompts, pack_row, plan_microbatches
from offbeat.errors import DataError


def make_batch(sequences, *, prefix_lens, group_ids, masks=None):
    lengths = [len(sequence) for sequence in sequences]
    if masks is None:
        masks = [np.arange(length) >= max(prefix, 1) for length, prefix in zip(lengths, prefix_lens, strict=True)]
    return Batch.of_next_tokens(
        np.concatenate([np.asarray(s, np.int32) for s in sequences] or [np.zeros(0, np.int32)]),
        np.concatenate([np.asarray(m, bool) for m in masks] or [np.zeros(0, bool)]), lengths=lengths, columns={}, losses=(),
        shared=SharedPrompts(np.asarray(group_ids, np.int64), np.asarray(prefix_lens, np.int64)))


def row_cost(batch, *, share_prefix):
    """Tokens of the row of a batch."""
    return len(pack_row(batch, share_prefix=share_prefix))


@st.composite
def batches(draw):
    """Groups that mostly keep their promise of equal prompts, with random masks, empty answers and untrained tails."""
    sequences, prefix_lens, group_ids, masks = [], [], [], []
    for group in range(draw(st.integers(0, 5))):
        prompt = draw(st.lists(st.integers(0, 3), min_size=0, max_size=5))
        for _ in range(draw(st.integers(1, 4))):
            other = st.lists(st.integers(0, 3), min_size=len(prompt), max_size=len(prompt))
            start = draw(other) if draw(st.integers(0, 4)) == 0 else prompt
            sequence = start + draw(st.lists(st.integers(0, 9), min_size=0 if start else 1, max_size=6))
            sequences.append(sequence)
            prefix_lens.append(len(prompt))
            group_ids.append(group)
            masks.append([i >= max(1, len(prompt)) and draw(st.booleans()) for i in range(len(sequence))])
    order = draw(st.permutations(range(len(sequences))))
    pick = lambda values: [values[i] for i in order]  # noqa: E731
    return make_batch(pick(sequences), prefix_lens=np.array(pick(prefix_lens)), group_ids=np.array(pick(group_ids)), masks=pick(masks))


costs = st.sampled_from([CostModel(1.0, 0.0), CostModel(0.0, 1.0), CostModel(3.0, 0.1, 7.0)])


def visible(row, index):
    """Row indices that a token attends to, in order, by the definition of Segments."""
    segments = row.segments
    segment = int(np.flatnonzero((segments.starts <= index) & (index < segments.starts + segments.lengths))[0])
    own = list(range(segments.starts[segment], index + 1))
    prefix = segments.prefix[segment]
    return (list(range(segments.starts[prefix], segments.starts[prefix] + segments.lengths[prefix])) if prefix >= 0 else []) + own


@given(batches(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_each_scored_token_is_predicted_from_exactly_the_tokens_before_it_in_its_sequence(batch, share):
    row = pack_row(batch, share_prefix=share)
    assert row.batch_index.tolist() == list(range(batch.num_targets))
    for source, target, index in zip(row.source, row.target, row.batch_index, strict=True):
        before = slice(batch.offsets[batch.target_sequences[index]], batch.positions[index] + 1)
        seen = visible(row, int(source))
        assert target == batch.targets[index]
        assert row.tokens[seen].tolist() == batch.tokens[before].tolist()
        assert row.positions[seen].tolist() == list(range(len(seen)))


@given(batches(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_row_holds_what_targets_look_at_and_sharing_never_costs_more(batch, share):
    row = pack_row(batch, share_prefix=share)
    assert len(row) == row.segments.lengths.sum()
    assert row_cost(batch, share_prefix=True) <= row_cost(batch, share_prefix=False)
    # Nothing is laid out that no scored token looks at.
    assert set(range(len(row))) == {seen for source in row.source for seen in visible(row, int(source))}


def test_the_worked_example_of_the_module_is_what_comes_out():
    batch = make_batch([[7, 8, 1, 2], [7, 8, 3]], prefix_lens=[2, 2], group_ids=[0, 0])
    row = pack_row(batch, share_prefix=True)
    assert row.tokens.tolist() == [7, 8, 1]
    assert row.positions.tolist() == [0, 1, 2]
    assert row.source.tolist() == [1, 2, 1]
    assert row.target.tolist() == [1, 2, 3]
    assert row.batch_index.tolist() == [0, 1, 2]
    assert (row.segments.starts.tolist(), row.segments.lengths.tolist(), row.segments.prefix.tolist()) == ([0, 2], [2, 1], [-1, 0])


@given(batches(), st.booleans(), st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_families_stand_together_and_every_segment_knows_whose_tokens_it_runs(batch, share, seed):
    families = np.random.default_rng(seed).integers(0, 3, batch.group_ids.max(initial=0) + 1)[batch.group_ids]
    row = pack_row(batch, share_prefix=share, families=families)
    assert (np.diff(families[row.owner]) >= 0).all()
    for start, length, owner in zip(row.segments.starts, row.segments.lengths, row.owner, strict=True):
        positions = row.positions[start:start + length]
        assert (row.tokens[start:start + length] == batch.tokens[batch.offsets[owner] + positions]).all()
    for source, index in zip(row.source, row.batch_index, strict=True):
        before = slice(batch.offsets[batch.target_sequences[index]], batch.positions[index] + 1)
        assert row.tokens[visible(row, int(source))].tolist() == batch.tokens[before].tolist()


def test_a_prompt_that_differs_although_its_group_id_is_equal_is_not_shared():
    batch = make_batch([[7, 8, 1, 2], [7, 9, 3, 4]], prefix_lens=[2, 2], group_ids=[0, 0])
    assert row_cost(batch, share_prefix=True) == row_cost(batch, share_prefix=False) == 6


def test_prompts_are_found_in_the_tokens_up_to_the_first_target_that_counts():
    batch = make_batch(
        [[7, 8, 1, 2], [7, 8, 3], [7, 9, 3], [7, 8]], prefix_lens=[0] * 4, group_ids=[0] * 4,
        masks=[[0, 1, 1, 1], [0, 0, 1], [0, 0, 1], [0, 0]])
    found = find_prompts(batch.with_columns(loss_weights=np.array([0.0, 0.5, 1.0, 1.0, 1.0])))
    assert found.prefix_lens.tolist() == [2, 2, 2, 0]
    assert found.group_ids[0] == found.group_ids[1] and len(set(found.group_ids.tolist())) == 3
    assert row_cost(found, share_prefix=True) == 5


@given(batches(), st.integers(1, 4), st.integers(10, 40), st.booleans(), st.booleans(), costs)
@settings(max_examples=300, deadline=None)
def test_a_plan_holds_every_sequence_once_under_the_cap_with_equal_counts(batch, num_ranks, max_tokens, share, balance, cost):
    plan = plan_microbatches(
        batch, num_ranks=num_ranks, max_tokens=max_tokens, share_prefix=share, cost=cost, balance=balance).microbatches
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= 1
    micros = [micro for rank in plan for micro in rank]
    assert sorted(np.concatenate(micros).tolist()) == list(range(len(batch)))
    costs = [row_cost(batch.select(micro), share_prefix=share) for micro in micros]
    assert max(costs) <= max_tokens
    if balance:
        # First-fit decreasing needs at most 11/9 of the fewest bins, plus one, and splits of large groups pay for their prompt again.
        fewest = row_cost(batch, share_prefix=False) / max_tokens
        assert len(plan[0]) <= max(1, np.ceil((2 * fewest + 1) / num_ranks))


@given(batches(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_sequences_that_share_a_prompt_stay_together_while_they_fit(batch, num_ranks):
    cap = max(1, row_cost(batch, share_prefix=True))
    plan = plan_microbatches(batch, num_ranks=num_ranks, max_tokens=cap, share_prefix=True).microbatches
    total = sum(row_cost(batch.select(micro), share_prefix=True) for rank in plan for micro in rank)
    assert total == row_cost(batch, share_prefix=True)


def test_a_group_beyond_the_cap_is_split_and_each_part_pays_for_the_prompt():
    batch = make_batch([[5] * 4 + [1, 2, 3]] * 6, prefix_lens=[4] * 6, group_ids=[0] * 6)
    plan = plan_microbatches(batch, num_ranks=1, max_tokens=9, share_prefix=True).microbatches
    assert [row_cost(batch.select(micro), share_prefix=True) for micro in plan[0]] == [8, 8, 8]


def test_a_tight_cap_is_filled_where_even_shares_would_not_fit():
    # 7+5, 7+5, 6+6 and 4+4+4 fill four micro-batches to the last token; dealing by length alone would need a fifth.
    lengths = [7, 7, 6, 6, 5, 5, 4, 4, 4]
    batch = make_batch([[1] * (n + 1) for n in lengths], prefix_lens=[0] * 9, group_ids=range(9))
    plan = plan_microbatches(batch, num_ranks=2, max_tokens=12, share_prefix=False).microbatches
    assert len(plan[0]) == 2
    assert max(row_cost(batch.select(micro), share_prefix=False) for rank in plan for micro in rank) <= 12


def test_ranks_without_work_get_empty_microbatches():
    batch = make_batch([[1, 2, 3]], prefix_lens=[0], group_ids=[0])
    plan = plan_microbatches(batch, num_ranks=3, max_tokens=8, share_prefix=False).microbatches
    assert [[micro.tolist() for micro in rank] for rank in plan] == [[[0]], [[]], [[]]]
    assert plan[1][0].dtype == np.int64


def test_a_sequence_beyond_the_cap_is_refused_by_name():
    batch = make_batch([[1] * 3, [1] * 12], prefix_lens=[0, 0], group_ids=[0, 1])
    with pytest.raises(DataError, match=r"sequence 1 of 12 tokens .* exceeds train.max_tokens_per_microbatch = 8"):
        plan_microbatches(batch, num_ranks=1, max_tokens=8, share_prefix=False)


def test_tokens_are_balanced_over_ranks():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4, 0.9, 256), 16, 512).astype(int)
    batch = make_batch([[1] * n for n in lengths], prefix_lens=[0] * 256, group_ids=range(256))
    plan = plan_microbatches(batch, num_ranks=8, max_tokens=1024, share_prefix=False).microbatches
    loads = [sum(row_cost(batch.select(micro), share_prefix=False) for micro in rank) for rank in plan]
    assert max(loads) <= 1.01 * np.mean(loads)


@given(batches(), st.integers(1, 4), st.integers(10, 40), st.booleans(), st.booleans(), costs)
@settings(max_examples=150, deadline=None)
def test_the_work_of_each_rank_is_that_of_its_rows_and_no_split_is_below_the_bound(batch, num_ranks, max_tokens, share, balance, cost):
    plan = plan_microbatches(batch, num_ranks=num_ranks, max_tokens=max_tokens, share_prefix=share, cost=cost, balance=balance)
    for rank, work in zip(plan.microbatches, plan.work, strict=True):
        segments = [pack_row(batch.select(micro), share_prefix=share).segments for micro in rank]
        assert work.tolist() == sum((run_work(s.lengths, s.prefix_lengths).sum(axis=0) for s in segments), np.zeros(2)).tolist()
    assert plan.work_in_order.sum(axis=0).tolist() == plan.work.sum(axis=0).tolist()
    assert max(cost.load(plan.work)) >= plan.lower_bound * (1 - 1e-12)
    if not balance:
        assert plan.work.tolist() == plan.work_in_order.tolist()


@given(batches(), st.integers(1, 4), st.booleans())
@settings(max_examples=100, deadline=None)
def test_unbalanced_groups_are_dealt_in_their_order_as_many_to_each_rank(batch, num_ranks, share):
    plan = plan_microbatches(batch, num_ranks=num_ranks, max_tokens=40, share_prefix=share, balance=False)
    order = list(dict.fromkeys(batch.group_ids.tolist()))
    sizes = []
    for rank in plan.microbatches:
        members = np.sort(np.concatenate(rank)).tolist()
        own = list(dict.fromkeys(batch.group_ids[members].tolist()))
        assert own == order[sum(sizes) : sum(sizes) + len(own)]
        sizes.append(len(own))
    assert sum(sizes) == len(order) and max(sizes) - min(sizes) <= 1


def whole_groups(lengths):
    """Groups of two sequences that share a prompt of 4 and score `length` tokens each."""
    tokens = [[group + 2] * 4 + [1] * (length + 1) for group, length in enumerate(lengths) for _ in range(2)]
    return make_batch(tokens, prefix_lens=[4] * len(tokens), group_ids=np.repeat(np.arange(len(lengths)), 2))


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize(("num_groups", "per_rank"), [(7, [1, 2, 2, 2]), (1, [0, 0, 0, 1]), (0, [0, 0, 0, 0])])
def test_counts_need_not_divide_and_a_rank_may_get_none(num_groups, per_rank, balance):
    plan = plan_microbatches(whole_groups([3] * num_groups), num_ranks=4, max_tokens=64, share_prefix=True, balance=balance)
    assert sorted(sum(map(len, rank)) // 2 for rank in plan.microbatches) == per_rank
    assert {len(rank) for rank in plan.microbatches} == {1}


def test_one_long_group_outweighs_many_short_ones_where_attention_counts():
    batch = whole_groups([40, 10, 10, 10, 10, 10, 10])
    by_tokens = plan_microbatches(batch, num_ranks=2, max_tokens=1024, share_prefix=True)
    by_pairs = plan_microbatches(batch, num_ranks=2, max_tokens=1024, share_prefix=True, cost=CostModel(1.0, 1.0))
    groups = [[len(rank[0]) // 2 for rank in plan.microbatches] for plan in (by_tokens, by_pairs)]
    assert [sorted(counts) for counts in groups] == [[2, 5], [1, 6]]


def test_sequences_of_no_tokens_and_of_nothing_to_score_cost_nothing():
    batch = make_batch([[], [1, 2, 3], [1, 2]], prefix_lens=[0, 0, 0], group_ids=[0, 1, 2], masks=[[], [False, True, True], [False, False]])
    plan = plan_microbatches(batch, num_ranks=2, max_tokens=8, share_prefix=True)
    assert sorted(int(i) for rank in plan.microbatches for micro in rank for i in micro) == [0, 1, 2]
    assert sorted(plan.work.tolist()) == [[0, 0], [2, 4]]


def test_no_ranks_are_refused():
    with pytest.raises(DataError, match="number of ranks must be at least 1, got 0"):
        plan_microbatches(whole_groups([3]), num_ranks=0, max_tokens=8, share_prefix=True)


@given(batches(), st.booleans(), st.integers(1, 3), st.integers(0, 30), st.booleans(), costs)
@settings(max_examples=100, deadline=None)
def test_groups_that_must_stay_whole_do_within_the_budget(batch, share, num_ranks, spare, balance, cost):
    groups = [np.flatnonzero(batch.group_ids == group) for group in np.unique(batch.group_ids)]
    largest = max((row_cost(batch.select(members), share_prefix=share) for members in groups), default=0)
    plan = plan_microbatches(
        batch, num_ranks=num_ranks, max_tokens=largest + spare, share_prefix=share, whole_groups=True, cost=cost, balance=balance)
    micros = [micro for rank in plan.microbatches for micro in rank]
    assert sorted(np.concatenate(micros).tolist()) == list(range(len(batch)))
    assert {len(rank) for rank in plan.microbatches} == {len(plan.microbatches[0])}
    for micro in micros:
        assert row_cost(batch.select(micro), share_prefix=share) <= largest + spare
        for members in groups:
            assert set(members) <= set(micro) or not set(members) & set(micro), "a group is in one micro-batch"


def test_a_pair_larger_than_the_budget_is_refused_and_not_split():
    pair = make_batch([[1, 2, 3, 4], [1, 2, 5, 6, 7]], prefix_lens=[2, 2], group_ids=[7, 7])
    plan = plan_microbatches(pair, num_ranks=1, max_tokens=5, share_prefix=True, whole_groups=True)
    assert [micro.tolist() for micro in plan.microbatches[0]] == [[0, 1]]
    for share, needed in ((True, 5), (False, 7)):
        with pytest.raises(DataError, match=(
                rf"the 2 sequences of group 7, of 4 and 5 tokens, need a row of {needed}, which exceeds"
                rf" train.max_tokens_per_microbatch = {needed - 1}; their loss compares them")):
            plan_microbatches(pair, num_ranks=1, max_tokens=needed - 1, share_prefix=share, whole_groups=True)
