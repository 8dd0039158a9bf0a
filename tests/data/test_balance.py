import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.data.balance import longest_first


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_every_item_is_in_one_part_and_the_dearest_part_keeps_grahams_bound(costs, k):
    parts = longest_first(costs, k)
    assert len(parts) == k
    assert sorted(item for part in parts for item in part) == list(range(len(costs)))
    lower = max([*costs, -(-sum(costs) // k)])
    # The bound is on the optimum, which may lie above this lower bound; greedy never exceeds the mean by more than its last item.
    heaviest = max(sum(costs[i] for i in part) for part in parts)
    assert heaviest <= sum(costs) / k + max(costs, default=0)
    assert heaviest >= lower


def test_items_without_cost_are_spread_too():
    assert [len(part) for part in longest_first([0] * 8, 4)] == [2, 2, 2, 2]


def test_the_example_of_five_items_on_two_ranks_is_split_by_hand():
    assert longest_first([7, 5, 4, 3, 1], 2) == [[0, 3], [1, 2, 4]]


def test_numpy_costs_give_the_same_split():
    costs = np.array([5, 3, 3, 2])
    assert longest_first(costs, 2) == longest_first(costs.tolist(), 2)


def test_no_parts_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        longest_first([1], 0)
