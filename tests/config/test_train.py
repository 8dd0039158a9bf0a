"""[train] and [sft]: the optimizer."""

import pytest
from pydantic import ValidationError

from offbeat.config.load import load_config
from offbeat.config.root import Config
from offbeat.config.train import OptimizerConfig, SftConfig
from offbeat.errors import ConfigError


def test_the_rate_of_every_optimizer_is_left_open_and_only_supervised_training_warms_up():
    config = Config()
    sections = (config.train, config.sft, config.critic, config.preference, config.reward_model)
    assert [section.optimizer.lr for section in sections] == ["auto"] * 5
    assert [section.optimizer.warmup_steps for section in sections] == [0, 30, 0, 10, 10]


def test_a_rate_that_is_open_cannot_be_trained_with():
    with pytest.raises(AssertionError, match="chooses its learning rates before"):
        _ = OptimizerConfig().peak
    assert OptimizerConfig(lr=1e-3).peak == 1e-3


@pytest.mark.parametrize(("given", "said"), [
    ("high", 'train.optimizer.lr must be a number or "auto", got \'high\''), ("true", 'must be a number or "auto", got True'),
    ("0", "train.optimizer.lr must be > 0, got 0"), ("1e308", "train.optimizer.lr must be < 10, got 1e+308"),
    ("nan", "train.optimizer.lr must be a finite number, got nan")])
def test_a_rate_that_is_none_is_refused(given, said):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [("train.optimizer.lr", given)])
    assert said in str(caught.value)


@pytest.mark.parametrize("values", [{"lr": 0}, {"beta1": 1.0}, {"min_lr_ratio": 1.1}, {"schedule": "step"}, {"clip_norm": -1}])
def test_values_with_which_adamw_cannot_work_are_refused(values):
    with pytest.raises(ValidationError):
        OptimizerConfig(**values)


def test_clipping_may_be_off_and_accuracy_is_a_share():
    assert OptimizerConfig(clip_norm=0).clip_norm == 0
    with pytest.raises(ValidationError):
        SftConfig(stop_at_accuracy=1.5)
