"""[preference]: settings that cannot act with the chosen loss are refused."""

import pytest

from offbeat.config.load import load_config
from offbeat.errors import ConfigError


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"loss": "kto", "label_smoothing": "0.1"},
     "preference.label_smoothing must be 0 with preference.loss = 'kto', got 0.1; only dpo, robust"),
    ({"desirable_weight": "2"}, "preference.desirable_weight must be 1 with preference.loss = 'dpo', got 2; only kto weighs labels"),
    ({"loss": "simpo", "mix": "{dpo = 1}"}, "preference.loss must be left out with preference.mix, got 'simpo'; name it in the mix"),
    ({"mix": "{dpo = 1, kto = 1}"}, "preference.mix has no loss of pairs 'kto'; it takes dpo, robust, "),
    ({"mix": "{dpo = -1}"}, "preference.mix.dpo must be a finite weight above 0, got -1"),
    ({"mix": "{hinge = 1, sft = 1}", "label_smoothing": "0.1"}, "preference.label_smoothing must be 0 with preference.mix of hinge, sft"),
    ({"gamma": "1.0"}, "preference.gamma must be left out with preference.loss = 'dpo', got 1; only simpo has a margin to reach"),
    ({"label_smoothing": "0.5"}, "preference.label_smoothing must be < 0.5, got 0.5"),
    ({"loss": "orpp"}, "'sft', 'kto', got 'orpp'; did you mean 'orpo'?"),
])
def test_a_contradiction_is_refused(settings: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, [(f"preference.{name}", value) for name, value in settings.items()])
    assert sentence in str(refused.value)


def test_each_loss_is_allowed_what_it_reads() -> None:
    for settings in (
        {"loss": "robust", "label_smoothing": "0.1"}, {"loss": "kto", "desirable_weight": "1.5", "undesirable_weight": "0.5"},
        {"mix": "{simpo = 1, sft = 0.2}", "gamma": "1.0"}, {"loss": "simpo", "gamma": "1.0"},
        {"loss": "dpo", "label_smoothing": "0.1"}, {"loss": "ipo", "beta": "0.2"}):
        load_config(None, [(f"preference.{name}", value) for name, value in settings.items()])
