"""[algorithm]: presets and bounds."""

import pytest
from pydantic import ValidationError

from offbeat.config.algorithms import PRESETS, AlgorithmConfig


def test_the_default_is_grpo():
    assert AlgorithmConfig() == AlgorithmConfig(preset="grpo")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_fills_exactly_what_it_names_and_a_given_field_wins(preset):
    filled = AlgorithmConfig(preset=preset)
    assert {name: getattr(filled, name) for name in PRESETS[preset]} == PRESETS[preset]
    assert AlgorithmConfig(preset=preset, loss_aggregation="sequence_mean").loss_aggregation == "sequence_mean"


def test_the_lower_clip_stays_below_one():
    assert AlgorithmConfig(clip_low=0.0).clip_low == 0
    with pytest.raises(ValidationError):
        AlgorithmConfig(clip_low=1.0)
