"""[preference]: settings that cannot act with the chosen loss are refused."""

import pytest

from offbeat.config.load import load_config
from offbeat.errors import ConfigError


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"loss": "kto", "label_smoothing": "0.1"}, "preference.label_smoothing must be 0 with preference.loss = 'kto', got 0.1; only dpo"),
    ({"gamma": "1.0"}, "preference.gamma must be left out with preference.loss = 'dpo', got 1; only simpo has a margin to reach"),
    ({"label_smoothing": "0.5"}, "preference.label_smoothing must be < 0.5, got 0.5"),
    ({"loss": "orpo"}, "preference.loss must be one of 'dpo', 'ipo', 'simpo', 'kto', got 'orpo'"),
])
def test_a_contradiction_is_refused(settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, [(f"preference.{name}", value) for name, value in settings.items()])
    assert sentence in str(refused.value)


def test_each_loss_is_allowed_what_it_reads() -> None:
    for settings in ({"loss": "simpo", "gamma": "1.0"}, {"loss": "dpo", "label_smoothing": "0.1"}, {"loss": "ipo", "beta": "0.2"}):
        load_config(None, [(f"preference.{name}", value) for name, value in settings.items()])
