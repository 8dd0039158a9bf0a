"""How far a step in bfloat16 is from one in float64; what is compared is in `precision_errors.py`."""

import pytest

from precision_errors import FAMILIES, QUANTITIES, errors_of


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_in_bfloat16_is_as_close_to_float64_as_under_plain_autocast(family):
    found = errors_of(family)
    for quantity in QUANTITIES:
        assert 0 < found["device"][quantity] < 1.2 * found["autocast"][quantity] < 1, (family, quantity, found)
