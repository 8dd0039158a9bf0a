"""[reward_model]: what cannot be is refused."""

import pytest

from offbeat.config.load import load_config
from offbeat.errors import ConfigError


def test_a_negative_weight_of_centring_is_refused_and_none_is_allowed() -> None:
    assert load_config(None, [("reward_model.centring", "0")]).reward_model.centring == 0
    with pytest.raises(ConfigError, match="reward_model.centring must be >= 0, got -1"):
        load_config(None, [("reward_model.centring", "-1")])
