"""The learning rate by hand, and which parameters decay."""

import pytest
import torch

from offbeat.config.train import OptimizerConfig
from offbeat.trainer.optim import build_optimizer, learning_rate, set_learning_rate


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


def test_norms_and_biases_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(model, config=OptimizerConfig(lr=1.0, weight_decay=0.25))
    set_learning_rate(optimizer, 0.5)
    optimizer.step()
    assert torch.all(model[0].weight == 1 - 0.5 * 0.25)
    assert all(torch.all(parameter == 1) for parameter in (model[0].bias, model[1].weight, model[1].bias))


def test_frozen_parameters_have_no_optimizer_state():
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    assert [len(group["params"]) for group in build_optimizer(model, config=OptimizerConfig()).param_groups] == [1]
