"""Ranges of arrays are read and filled as their indices would be, one by one."""

from itertools import pairwise

import numpy as np

from offbeat.data.ranges import any_in_ranges, gather_ranges, over_ranges, take_ranges


def test_ranges_are_read_and_filled_as_their_indices_would_be() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(0, 4, rng.integers(0, 8))
        offsets, indices = np.cumsum([0, *lengths]), np.flatnonzero(rng.random(len(lengths)) < 0.6)
        values, each = rng.random(offsets[-1]).astype(np.float32), rng.random(len(lengths)).astype(np.float32)
        np.testing.assert_array_equal(take_ranges(values, offsets, indices), values[gather_ranges(offsets, indices)])
        spread, some = over_ranges(each, offsets), any_in_ranges(values > 0.5, offsets)
        np.testing.assert_array_equal(spread, np.repeat(each, lengths))
        assert spread.dtype == each.dtype and some.tolist() == [
            bool((values[start:end] > 0.5).any()) for start, end in pairwise(offsets)]
