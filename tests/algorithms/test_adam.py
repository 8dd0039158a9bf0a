"""Settings of an update are checked where they enter; the learning rate by hand."""

import pytest

from offbeat.algorithms.adam import AdamParams, adam_params, learning_rate
from offbeat.config.train import OptimizerConfig
from offbeat.errors import ConfigError


def test_settings_in_range_are_taken() -> None:
    assert AdamParams(lr=0.0, beta1=0.0, clip_norm=1.0).weight_decay == 0.0


@pytest.mark.parametrize(("name", "value"), [
    ("lr", -1e-3), ("lr", 1e308), ("lr", float("nan")), ("lr", float("inf")),
    ("beta1", 1.0), ("beta2", -0.1), ("eps", 0.0), ("eps", float("nan")),
    ("weight_decay", -1.0), ("clip_norm", float("inf"))])
def test_a_setting_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} of an optimizer step must be"):
        AdamParams(**({"lr": 1e-3} | {name: value}))


def rates(total_steps, **config):
    return [learning_rate(step, config=OptimizerConfig(lr=1.0, **config), total_steps=total_steps) for step in range(total_steps + 2)]


def test_a_warm_up_rises_in_equal_parts_to_the_peak():
    assert rates(6, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0])


def test_a_linear_decay_reaches_its_end_at_the_last_step_and_stays():
    assert rates(6, warmup_steps=1, schedule="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_a_cosine_is_half_way_in_the_middle():
    assert rates(5, schedule="cosine", min_lr_ratio=0.0) == pytest.approx(
        [1.0, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2, 0.0, 0.0, 0.0])


def test_a_schedule_of_one_step_is_at_the_peak():
    assert learning_rate(0, config=OptimizerConfig(lr=2.0, schedule="cosine"), total_steps=1) == 2.0


def test_a_steps_settings_are_those_of_the_configuration_at_its_learning_rate() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, clip_norm=0.5)
    assert adam_params(0, config=config, total_steps=9) == AdamParams(
        lr=0.5, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, clip_norm=0.5)
