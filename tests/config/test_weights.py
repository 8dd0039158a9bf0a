"""[weights]: publishing."""

import pytest
from pydantic import ValidationError

from offbeat.config.weights import WeightsConfig


def test_generation_goes_on_under_new_weights_by_default():
    assert WeightsConfig().interrupt == "recompute"


@pytest.mark.parametrize("values", [{"keep": 0}, {"interrupt": "abort"}, {"proof_tolerance": -1e-3}, {"stage_timeout_s": 0}])
def test_values_without_meaning_are_refused(values):
    with pytest.raises(ValidationError):
        WeightsConfig(**values)
