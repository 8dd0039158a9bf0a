"""Objectives are chosen by name."""

import pytest
import torch

from offbeat.algorithms.losses import ppo_clip
from offbeat.algorithms.presets import LossInputs, objective
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.errors import ConfigError

INPUTS = LossInputs(
    logprobs=torch.tensor([-1.0, -0.1]), prox_logprobs=torch.tensor([-1.5, -0.2]),
    rollout_logprobs=torch.tensor([-1.6, -0.1]), advantages=torch.tensor([1.0, -1.0]))


def test_ppo_uses_all_inputs_and_the_constants_of_its_configuration():
    config = AlgorithmConfig(clip_high=0.1)
    ppo = objective("ppo", config=config)
    expected = ppo_clip(INPUTS.logprobs, INPUTS.prox_logprobs, INPUTS.rollout_logprobs, INPUTS.advantages, config=config)
    assert ppo.needs_prox
    assert torch.equal(ppo.loss(INPUTS).losses, expected.losses)


def test_sft_needs_log_probabilities_alone():
    sft = objective("sft", config=AlgorithmConfig())
    assert not sft.needs_prox
    assert torch.equal(sft.loss(INPUTS).losses, -INPUTS.logprobs)


def test_only_objectives_about_samples_know_the_temperature_of_the_sampling():
    assert [objective(name, config=AlgorithmConfig()).temperature(0.7) for name in ("ppo", "sft")] == [0.7, 1.0]


def test_an_unknown_objective_names_the_known_ones():
    with pytest.raises(ConfigError, match="one of ppo, sft, got 'dpo'"):
        objective("dpo", config=AlgorithmConfig())
