"""Which algorithms need a reference policy."""

import pytest

from offbeat.algorithms.reference import needs_reference, refresh_steps
from offbeat.config.algorithms import AlgorithmConfig


def test_the_default_algorithm_needs_none() -> None:
    assert not needs_reference(AlgorithmConfig())
    assert refresh_steps(AlgorithmConfig()) == 0


@pytest.mark.parametrize("fields", [{"kl_loss": "k3"}, {"reward_kl": 0.1}, {"kl_loss": "k2", "reward_kl": 0.1}])
def test_a_divergence_from_the_reference_needs_one(fields: dict) -> None:
    config = AlgorithmConfig().model_copy(update={**fields, "reference_refresh_steps": 5})
    assert needs_reference(config) and refresh_steps(config) == 5
