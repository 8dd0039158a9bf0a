"""Splits against brute force, bounds, certificates and bad input."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.data.balance import karmarkar_karp, longest_first, lower_bound, partition
from offbeat.errors import DataError

costs_and_k = st.tuples(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 9))


def lognormal(n, seed=0):
    return np.random.default_rng(seed).lognormal(4.0, 0.9, n).clip(16, 4096).round()


def largest(costs, parts):
    return max(sum(costs[i] for i in part) for part in parts)


def optimum(costs, k, *, equal_size):
    best = np.inf
    for choice in product(range(k), repeat=len(costs)):
        counts = [choice.count(part) for part in range(k)]
        if not equal_size or max(counts) - min(counts) <= 1:
            best = min(best, max(sum(c for c, chosen in zip(costs, choice, strict=True) if chosen == part) for part in range(k)))
    return best


@pytest.mark.parametrize("equal_size", [False, True])
@settings(max_examples=200, deadline=None)
@given(costs_and_k)
def test_every_item_is_in_one_part_and_the_certificate_is_true(equal_size, given_):
    costs, k = given_
    result = partition(costs, k, equal_size=equal_size)
    assert sorted(i for part in result.parts for i in part) == list(range(len(costs)))
    assert len(result.parts) == k
    assert result.largest == pytest.approx(largest(costs, result.parts))
    assert result.lower_bound <= result.largest + 1e-9
    assert result.largest <= largest(costs, longest_first(costs, k)) + 1e-9 or equal_size
    if equal_size:
        sizes = [len(part) for part in result.parts]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("equal_size", [False, True])
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 3))
def test_small_splits_are_optimal(equal_size, costs, k):
    assert partition(costs, k, equal_size=equal_size).largest == optimum(costs, k, equal_size=equal_size)


def test_a_dozen_items_are_split_optimally():
    rng = np.random.default_rng(1)
    for _ in range(3):
        costs = rng.integers(1, 100, 12).tolist()
        assert partition(costs, 2).largest == optimum(costs, 2, equal_size=False)


@settings(max_examples=100, deadline=None)
@given(costs_and_k)
def test_the_lower_bound_never_exceeds_any_split(given_):
    costs, k = given_
    assert lower_bound(np.array(costs, dtype=float), k) <= largest(costs, longest_first(costs, k)) + 1e-9


@pytest.mark.parametrize("equal_size", [False, True])
@settings(max_examples=100, deadline=None)
@given(costs_and_k)
def test_differencing_places_every_item_once(equal_size, given_):
    costs, k = given_
    parts = karmarkar_karp(costs, k, equal_size)
    assert sorted(i for part in parts for i in part) == list(range(len(costs))) and len(parts) == k
    if equal_size:
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_differencing_of_a_known_case():
    # 8 7 6 5 4 in two parts: (8-7)=1, (6-5)=1, 4 and 1 make 3, 3 and 1 make 2: sums 16 and 14.
    assert largest([8, 7, 6, 5, 4], karmarkar_karp([8, 7, 6, 5, 4], 2, False)) == 16


@pytest.mark.parametrize("equal_size", [False, True])
@pytest.mark.parametrize(("n", "k"), [(256, 8), (1024, 8), (4096, 64)])
def test_skewed_lengths_are_split_close_to_the_bound(n, k, equal_size):
    whole = lognormal(n)
    assert partition(whole, k, equal_size=equal_size).gap < 1e-4
    costs = 3.0 * whole + 1e-3 * whole**2 + 0.1
    assert partition(costs, k, equal_size=equal_size).largest < max(costs.sum() / k, costs.max()) * (1 + (1e-3 if equal_size else 1e-4))


def test_items_of_no_cost_and_more_parts_than_items_are_fine():
    assert sorted(map(len, partition([0] * 8, 4).parts)) == [2, 2, 2, 2]
    assert sorted(map(len, partition([5, 3], 4).parts)) == [0, 0, 1, 1]
    empty = partition([], 3)
    assert (empty.parts, empty.gap) == (((), (), ()), 0.0)
    assert longest_first([7, 5, 4, 3, 1], 2) == [[0, 3], [1, 2, 4]]


def differencing(costs, k):
    return karmarkar_karp(costs, k, False)


@pytest.mark.parametrize("method", [partition, longest_first, differencing])
@pytest.mark.parametrize(("costs", "k", "sentence"), [
    ([1], 0, "number of parts must be at least 1, got 0"), ([1], -2, "number of parts must be at least 1, got -2"),
    ([1, float("nan")], 2, "got nan for item 1"), ([1, float("inf")], 2, "got inf for item 1"), ([-1.0], 1, "got -1.0 for item 0"),
])
def test_bad_input_is_one_sentence(method, costs, k, sentence):
    with pytest.raises(DataError, match=sentence):
        method(costs, k)


def test_every_method_takes_no_items_and_fewer_items_than_parts():
    for method in (longest_first, differencing, lambda costs, k: partition(costs, k, equal_size=True).parts):
        assert [list(part) for part in method([], 2)] == [[], []]
        assert sorted(map(list, method([5, 0], 3))) == [[], [0], [1]]
