"""[evaluate]: bounds."""

import pytest
from pydantic import ValidationError

from offbeat.config.controller import EvaluateConfig


def test_evaluation_is_greedy_by_default_and_may_be_left_to_the_ends():
    assert EvaluateConfig().temperature == 0
    assert EvaluateConfig(every_steps=0).every_steps == 0


@pytest.mark.parametrize("values", [{"num_prompts": 0}, {"temperature": -0.1}, {"timeout_s": 0}])
def test_values_without_meaning_are_refused(values):
    with pytest.raises(ValidationError):
        EvaluateConfig(**values)
