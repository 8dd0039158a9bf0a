"""Settings of an update are checked where they enter."""

import pytest

from offbeat.algorithms.adam import AdamParams
from offbeat.errors import ConfigError


def test_settings_in_range_are_taken() -> None:
    assert AdamParams(lr=0.0, beta1=0.0, clip_norm=1.0).weight_decay == 0.0


@pytest.mark.parametrize(("name", "value"), [
    ("lr", -1e-3), ("lr", float("nan")), ("lr", float("inf")), ("beta1", 1.0), ("beta2", -0.1), ("eps", 0.0), ("eps", float("nan")),
    ("weight_decay", -1.0), ("clip_norm", float("inf"))])
def test_a_setting_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} of an optimizer step must be"):
        AdamParams(**({"lr": 1e-3} | {name: value}))
