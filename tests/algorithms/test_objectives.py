"""Losses are chosen by name, with constants of their own."""

import subprocess
import sys

import numpy as np
import pytest

from offbeat.algorithms.objectives import CLIENT_LOSSES, OBJECTIVES, client_loss, policy_loss
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.data.batch import LossSpec
from offbeat.errors import DataError


def test_the_loss_of_reinforcement_learning_has_the_bounds_of_its_configuration_as_ratios() -> None:
    loss = policy_loss(AlgorithmConfig(clip_low=0.25, clip_high=0.5, dual_clip=3.0, weight="clamp", weight_high=2.0))
    assert loss == LossSpec("decoupled_ppo", {
        "clip_low": 0.75, "clip_high": 1.5, "dual_clip": 3.0, "behave_weight": "clamp", "behave_cap": 2.0})
    assert policy_loss(AlgorithmConfig()) == LossSpec("decoupled_ppo", dict(OBJECTIVES["decoupled_ppo"].constants))


def test_a_clients_loss_has_its_own_defaults_and_takes_only_its_own_constants() -> None:
    assert set(CLIENT_LOSSES) == OBJECTIVES.keys() - {"decoupled_ppo"}
    assert client_loss("ppo") == LossSpec("ppo", {"clip_low": 0.8, "clip_high": 1.2})
    assert client_loss("cispo") == LossSpec("cispo", {"clip_low": 0.0, "clip_high": 4.0})
    assert client_loss("dro") == LossSpec("dro", {"beta": 0.05})
    assert client_loss("gspo", clip_high=1.5) == LossSpec("gspo", {"clip_low": 0.8, "clip_high": 1.5})


@pytest.mark.parametrize(("name", "constants", "sentence"), [
    ("grpo", {}, "there is no loss 'grpo'; use one of cross_entropy, importance_sampling, ppo, cispo, dro, gspo"),
    ("decoupled_ppo", {}, "there is no loss 'decoupled_ppo'"),
    ("dro", {"clip_low": 1.0}, "the loss dro has no constant 'clip_low'; it has beta"),
    ("cross_entropy", {"beta": 1.0}, "cross_entropy has no constant 'beta'; it has none"),
    ("ppo", {"clip_low": 1.5}, "0 <= low <= high, got 1.5 and 1.2"),
    ("ppo", {"clip_high": np.inf}, "0 <= low <= high, got 0.8 and inf"),
    ("dro", {"beta": np.nan}, "beta of dro must be finite and at least 0, got nan"),
])
def test_what_cannot_be_a_clients_loss_is_refused(name: str, constants: dict[str, float], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        client_loss(name, **constants)


def test_only_the_policys_loss_knows_the_temperature_of_the_sampling_and_only_imitation_drops_inputs() -> None:
    assert [name for name, objective in OBJECTIVES.items() if objective.at_temperature] == ["decoupled_ppo"]
    assert [name for name, objective in OBJECTIVES.items() if objective.drops_inputs] == ["cross_entropy"]
    assert [name for name, objective in OBJECTIVES.items() if objective.by_sequence] == ["gspo"]


def test_the_table_can_be_read_without_torch() -> None:
    code = "import sys, offbeat.algorithms.objectives; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
