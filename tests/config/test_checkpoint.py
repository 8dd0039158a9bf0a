"""[checkpoint]: bounds."""

import pytest
from pydantic import ValidationError

from offbeat.config.checkpoint import CheckpointConfig


def test_zero_steps_between_checkpoints_is_allowed_and_means_only_at_the_end():
    assert CheckpointConfig(every_steps=0).every_steps == 0


@pytest.mark.parametrize("values", [{"every_steps": -1}, {"keep": 0}, {"timeout_s": 0}])
def test_values_without_meaning_are_refused(values):
    with pytest.raises(ValidationError):
        CheckpointConfig(**values)
