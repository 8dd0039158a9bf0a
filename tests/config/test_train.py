"""[train] and [sft]: the optimizer."""

import pytest
from pydantic import ValidationError

from offbeat.config.train import OptimizerConfig, SftConfig, TrainConfig


def test_reinforcement_learning_starts_with_a_far_smaller_rate_than_supervised_warm_up():
    assert TrainConfig().optimizer.lr * 100 <= SftConfig().optimizer.lr
    assert SftConfig().optimizer.warmup_steps > 0


@pytest.mark.parametrize("values", [{"lr": 0}, {"beta1": 1.0}, {"min_lr_ratio": 1.1}, {"schedule": "step"}, {"clip_norm": -1}])
def test_values_with_which_adamw_cannot_work_are_refused(values):
    with pytest.raises(ValidationError):
        OptimizerConfig(**values)


def test_clipping_may_be_off_and_accuracy_is_a_share():
    assert OptimizerConfig(clip_norm=0).clip_norm == 0
    with pytest.raises(ValidationError):
        SftConfig(stop_at_accuracy=1.5)
