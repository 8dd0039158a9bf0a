"""[evaluate]: bounds."""

import pytest
from pydantic import ValidationError

from offbeat.config.evaluate import EvaluateConfig


def test_evaluation_is_greedy_by_default_and_may_be_left_to_the_ends():
    assert EvaluateConfig().temperature == 0
    assert EvaluateConfig(every_steps=0).every_steps == 0


@pytest.mark.parametrize("values", [{"num_prompts": 0}, {"temperature": -0.1}, {"timeout_s": 0}])
def test_values_without_meaning_are_refused(values):
    with pytest.raises(ValidationError):
        EvaluateConfig(**values)


def test_several_answers_need_chance_and_pass_at_k_needs_k_answers():
    assert EvaluateConfig(samples_per_prompt=4, temperature=0.7, pass_at=(1, 4)).pass_at == (1, 4)
    with pytest.raises(ValidationError, match="evaluate.temperature must be above 0 with evaluate.samples_per_prompt = 4, got 0"):
        EvaluateConfig(samples_per_prompt=4)
    for wrong in (0, 5):
        with pytest.raises(ValidationError, match=f"from 1 to evaluate.samples_per_prompt = 4, got {wrong}"):
            EvaluateConfig(samples_per_prompt=4, temperature=0.7, pass_at=(1, wrong))
