"""Splits items of known cost over ranks so that no rank is much busier than another, with a certificate of how good the split is.

Called by `data/packing.py`. Every item appears in exactly one part, and ties are broken by index, so every process computes the same
split. `partition` takes the best of its methods: longest-first, then moves and swaps; Karmarkar-Karp differencing where that leaves a gap;
and for a dozen items or fewer, the optimum.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from offbeat.errors import DataError

GOOD_GAP = 5e-5
"""A split this close to the lower bound is not improved further: 0.005 % of a step is less than the variation of its time."""
_MAX_EXACT_ITEMS = 12
_MAX_DIFFERENCING_WORK = 4_000_000
_PARTNERS = 6

Parts = list[list[int]]


@dataclass(frozen=True)
class Partition:
    """A split and its certificate.

    Attributes:
        parts: k tuples of item indices, ascending; some are empty when there are fewer items than parts.
        largest: cost of the most expensive part.
        lower_bound: no split has a most expensive part below this.
    """

    parts: tuple[tuple[int, ...], ...]
    largest: float
    lower_bound: float

    @property
    def gap(self) -> float:
        """How far the most expensive part exceeds the lower bound, as a share of the bound; 0 is proven optimal."""
        return self.largest / self.lower_bound - 1.0 if self.lower_bound else 0.0


def partition(costs: Sequence[float] | np.ndarray, k: int, *, equal_size: bool = False) -> Partition:
    """Split items into k parts so that the most expensive part costs as little as possible.

    Args:
        costs: [N] non-negative, one per item, such as [5, 4, 3], which two parts split into (0,) and (1, 2).
        k: number of parts, at least 1; it may exceed N.
        equal_size: the numbers of items in parts differ by at most 1.

    Raises:
        DataError: k < 1, or a cost is negative or not finite.
    """
    values = _checked(costs, k)
    bound = lower_bound(values, k)
    parts = _refine(values, _longest_first(values.tolist(), k, equal_size=equal_size), bound, equal_size=equal_size)
    if _largest(values, parts) > bound * (1 + GOOD_GAP) and len(values) * k <= _MAX_DIFFERENCING_WORK:
        other = _refine(values, karmarkar_karp(values, k, equal_size=equal_size), bound, equal_size=equal_size)
        parts = min(parts, other, key=lambda candidate: _largest(values, candidate))
        if len(values) <= _MAX_EXACT_ITEMS:
            parts = _exact(values.tolist(), k, parts, bound, equal_size=equal_size)
    return Partition(tuple(tuple(sorted(part)) for part in parts), _largest(values, parts), bound)


def lower_bound(costs: np.ndarray, k: int) -> float:
    """Return the largest of three lower bounds on the most expensive part: the mean, the most expensive item, and the pigeonhole bound.

    Of the j k + 1 most expensive items some part holds at least j + 1, which cost at least the j + 1 cheapest of them. The costs, [N]
    float64, are not negative.
    """
    if not len(costs):
        return 0.0
    descending = np.sort(costs)[::-1]
    sums = np.concatenate([[0.0], np.cumsum(descending)])
    ends = np.arange(k + 1, len(costs) + 1, k)
    pigeonhole = [sums[end] - sums[end - (j + 2)] for j, end in enumerate(ends.tolist())]
    bound = float(max(sums[-1] / k, descending[0], *pigeonhole))
    whole = bool((costs == np.floor(costs)).all()) and sums[-1] < 2**53
    return float(np.ceil(bound)) if whole else bound  # a sum of whole costs is whole


def karmarkar_karp(seqlen_list: Sequence[float] | np.ndarray, k_partitions: int, equal_size: bool) -> Parts:
    """Largest differencing: repeatedly combine the two partial splits with the largest spread, most expensive parts with cheapest.

    Partial splits keep only their non-empty parts, and a part is a tree of the parts it came from, so merging copies no items. Gives lists
    of the indices of items with costs [N]; raises as `partition`.

    Args:
        equal_size: start from blocks of k items, one per part, so that numbers of items differ by at most 1.

    Source: Karmarkar and Karp, "The differencing method of set partitioning", 1982.
    """
    values, k = _checked(seqlen_list, k_partitions), k_partitions
    order = np.argsort(-values, kind="stable").tolist()
    width = k if equal_size else 1
    states: list[tuple[float, int, list[tuple[float, Any]]]] = []
    for block in range(0, len(order), width):
        split = [(float(values[item]), item) for item in order[block : block + width]]
        states.append((-_spread(split, k), block, split))
    heapq.heapify(states)
    while len(states) > 1:
        _, tie, first = heapq.heappop(states)
        merged = _merge(first, states[0][2], k)
        heapq.heapreplace(states, (-_spread(merged, k), tie, merged))
    parts = [_leaves(tree) for _, tree in states[0][2]] if states else []
    return parts + [[] for _ in range(k - len(parts))]


def longest_first(costs: Sequence[float], k: int) -> Parts:
    """Give each item, most expensive first, to the part that is cheapest so far: at most 4/3 - 1/(3k) times the optimum.

    Raises as `partition`. Source: Graham, "Bounds on multiprocessing timing anomalies", 1969.
    """
    return _longest_first(_checked(costs, k).tolist(), k, equal_size=False)


def _checked(costs: Sequence[float] | np.ndarray, k: int) -> np.ndarray:
    if k < 1:
        raise DataError(f"the number of parts must be at least 1, got {k}")
    values = np.asarray(costs, dtype=np.float64).reshape(-1)
    if len(values) and not (np.isfinite(values).all() and values.min() >= 0):
        item = int(np.argmax(~np.isfinite(values) | (values < 0)))
        raise DataError(f"costs must be finite and not negative, got {values[item]} for item {item}")
    return values


def _largest(values: np.ndarray, parts: Parts) -> float:
    return max((float(values[part].sum()) if part else 0.0 for part in parts), default=0.0)


def _longest_first(costs: list[float], k: int, *, equal_size: bool) -> Parts:
    least, extra = divmod(len(costs), k) if equal_size else (len(costs), 0)
    parts: Parts = [[] for _ in range(k)]
    # The number of items breaks ties, so that items without cost are spread, too.
    open_parts = [(0.0, 0, part) for part in range(k)]
    for item in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        load, count, part = open_parts[0]
        while count >= least and not extra:  # only `extra` parts hold one more item; others are full
            heapq.heappop(open_parts)
            load, count, part = open_parts[0]
        parts[part].append(item)
        if count < least:
            heapq.heapreplace(open_parts, (load + costs[item], count + 1, part))
        else:
            extra -= 1
            heapq.heappop(open_parts)
    return parts


def _spread(split: list[tuple[float, Any]], k: int) -> float:
    return split[0][0] - (split[-1][0] if len(split) == k else 0.0)


def _merge(first: list[tuple[float, Any]], second: list[tuple[float, Any]], k: int) -> list[tuple[float, Any]]:
    """Merge two splits, each sorted by falling cost; two parts are combined only where there are more than k together."""
    shared = max(len(first) + len(second) - k, 0)
    alone_first, alone_second = len(first) - shared, len(second) - shared
    merged = first[:alone_first] + second[:alone_second]
    for (cost, tree), (other_cost, other_tree) in zip(first[alone_first:], reversed(second[alone_second:]), strict=True):
        merged.append((cost + other_cost, (tree, other_tree)))
    merged.sort(key=itemgetter(0), reverse=True)
    return merged


def _leaves(tree: Any) -> list[int]:
    leaves, stack = [], [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(node)
        else:
            leaves.append(node)
    return leaves


def _refine(values: np.ndarray, parts: Parts, bound: float, *, equal_size: bool) -> Parts:
    """Reduce the most expensive part by a move or a swap with one of the cheapest, until none helps or the bound is near.

    `values` are the [N] costs.
    Each exchange brings two parts closer without passing each other, so the sum of squared loads falls and the search ends.
    """
    members = [sorted(part, key=lambda item: values[item]) for part in parts]
    loads = np.array([values[part].sum() if part else 0.0 for part in members])
    for _ in range(20 * len(parts) + 100):
        high = int(loads.argmax())
        if loads[high] <= bound * (1 + GOOD_GAP):
            break
        lowest = np.argpartition(loads, min(_PARTNERS, len(loads)) - 1)[:_PARTNERS]
        for low in lowest[np.argsort(loads[lowest], kind="stable")].tolist():
            exchange = _best_exchange(values, members[high], members[low], loads[high] - loads[low], move=not equal_size)
            if exchange is not None:
                _apply(values, members, loads, high, low, exchange)
                break
        else:
            break
    return members


def _best_exchange(values: np.ndarray, high: list[int], low: list[int], difference: float, *, move: bool) -> tuple[int, int | None] | None:
    """Find the exchange that comes closest to halving the difference of two parts; `values` are the [N] costs.

    Returns an item of `high`, and one of `low`, or None for a move. None if no exchange reduces the difference.
    """
    dear, cheap = values[high], values[low]
    if move:
        cheap = np.concatenate([[0.0], cheap])  # an item without cost stands for a move, which gets nothing back
    if not len(dear) or not len(cheap):
        return None
    at = np.searchsorted(cheap, dear - difference / 2)
    candidates = np.stack([np.clip(at - 1, 0, len(cheap) - 1), np.clip(at, 0, len(cheap) - 1)])
    moved = dear - cheap[candidates]
    error = np.where((moved > 0) & (moved < difference), np.abs(moved - difference / 2), np.inf)
    side, item = np.unravel_index(int(error.argmin()), error.shape)
    if not np.isfinite(error[side, item]):
        return None
    partner = int(candidates[side, item]) - move
    return high[int(item)], low[partner] if partner >= 0 else None


def _apply(values: np.ndarray, members: Parts, loads: np.ndarray, high: int, low: int, exchange: tuple[int, int | None]) -> None:
    given, back = exchange
    for item, source, target in ((given, high, low), (back, low, high)):
        if item is None:
            continue
        members[source].remove(item)
        at = int(np.searchsorted(values[members[target]], values[item])) if members[target] else 0
        members[target].insert(at, item)
        loads[source] -= values[item]
        loads[target] += values[item]


def _exact(costs: list[float], k: int, best: Parts, bound: float, *, equal_size: bool) -> Parts:
    """Find the optimum by depth-first search, most expensive items first, pruned by the best known split and by parts that are alike."""
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    least, extra = divmod(len(costs), k)
    most = least + (extra > 0) if equal_size else len(costs)
    parts: Parts = [[] for _ in range(k)]
    loads = [0.0] * k
    found, limit = best, max(sum(costs[i] for i in part) for part in best)

    def search(depth: int) -> bool:
        nonlocal found, limit
        if depth == len(order):
            if not equal_size or max(map(len, parts)) - min(map(len, parts)) <= 1:
                found, limit = [list(part) for part in parts], max(loads)
            return limit <= bound * (1 + 1e-12)
        item, tried = order[depth], set()
        for part in range(k):
            alike = (loads[part], len(parts[part]))
            if alike in tried or len(parts[part]) >= most or loads[part] + costs[item] >= limit:
                continue
            tried.add(alike)
            parts[part].append(item)
            before, loads[part] = loads[part], loads[part] + costs[item]
            if search(depth + 1):
                return True
            parts[part].pop()
            loads[part] = before
        return False

    search(0)
    return found
