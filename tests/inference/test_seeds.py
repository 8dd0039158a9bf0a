"""The rest of a request that was cut has the keys that the whole would have had."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offbeat.engine.sampler import row_keys
from offbeat.inference.seeds import seed_from


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 5000), st.integers(1, 8))
def test_samples_from_any_number_on_are_those_of_the_whole(seed: int, first: int, num: int) -> None:
    np.testing.assert_array_equal(row_keys(seed_from(seed, first), num), row_keys(seed, first + num)[first:])


def test_the_first_samples_have_the_seed_itself() -> None:
    assert seed_from(-5, 0) == -5
