"""[telemetry]: what is recorded."""

import pytest
from pydantic import ValidationError

from offbeat.config.telemetry import TelemetryConfig


def test_everything_is_shown_and_recorded_by_default_and_can_be_turned_off():
    shown = TelemetryConfig()
    assert shown.console and shown.trace and shown.rollouts_every_steps > 0
    TelemetryConfig(console=False, trace=False, rollouts_every_steps=0, sample_tables_every_steps=0)


def test_a_negative_interval_is_refused():
    with pytest.raises(ValidationError):
        TelemetryConfig(rollouts_every_steps=-1)


def test_known_sinks_are_allowed_and_others_refused():
    assert TelemetryConfig().sinks == ()
    assert TelemetryConfig(sinks=["wandb", "tensorboard"]).sinks == ("wandb", "tensorboard")
    with pytest.raises(ValidationError, match="'tensorboard', 'wandb', 'trackio' or 'mlflow'"):
        TelemetryConfig(sinks=["abacus"])
