"""[checkpoint]: bounds."""

import pytest
from pydantic import ValidationError

from offbeat.config.checkpoint import CheckpointConfig


def test_steps_and_minutes_between_checkpoints_can_be_turned_off():
    assert (CheckpointConfig(every_steps=0).every_steps, CheckpointConfig(every_minutes=0).every_minutes) == (0, 0)


@pytest.mark.parametrize("values", [{"every_steps": -1}, {"every_minutes": -1}, {"keep": 0}, {"timeout_s": 0}])
def test_values_without_meaning_are_refused(values):
    with pytest.raises(ValidationError):
        CheckpointConfig(**values)
