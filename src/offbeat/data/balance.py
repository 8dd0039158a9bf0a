"""Splitting items of known cost over ranks so that no rank is much busier than another.

Called by `data/packing.py`. Pure integers in, index lists out; every item appears exactly once, and ties are broken by index, so every rank
computes the same split.
"""

import heapq
from collections.abc import Sequence


def longest_first(costs: Sequence[int], k: int) -> list[list[int]]:
    """Give each item, dearest first, to the part that is cheapest so far.

    Args:
        costs: one non-negative cost per item, in tokens.
        k: number of parts, at least 1.

    Returns:
        k lists of item indices, some empty when there are fewer items than parts. The dearest part costs at most 4/3 - 1/(3k) times
        the optimum.

    Raises:
        ValueError: k < 1.

    Source: Graham, "Bounds on multiprocessing timing anomalies", 1969.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    parts: list[list[int]] = [[] for _ in range(k)]
    # The number of items breaks ties, so that items of no cost are spread too.
    loads = [(0, 0, part) for part in range(k)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, count, part = loads[0]
        parts[part].append(item)
        heapq.heapreplace(loads, (load + costs[item], count + 1, part))
    return parts
