"""[weights]: publishing."""

from itertools import product

import pytest
from pydantic import ValidationError

from offbeat.config.load import load_config
from offbeat.config.root import Config
from offbeat.config.weights import WeightsConfig
from offbeat.errors import ConfigError


def test_generation_goes_on_under_new_weights_by_default():
    assert WeightsConfig().interrupt == "recompute"


@pytest.mark.parametrize("values", [
    {"keep": 0}, {"interrupt": "abort"}, {"proof_tolerance": -1e-3}, {"stage_timeout_s": 0}, {"whole_every_versions": 0}])
def test_values_without_meaning_are_refused(values):
    with pytest.raises(ValidationError):
        WeightsConfig(**values)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "true", "never"])
def test_versions_between_whole_ones_are_a_number_or_auto(text):
    assert [load_config(None, [("weights.whole_every_versions", good)]).weights.longest_chain for good in ("1", "7", "auto")] == [1, 7, 1]
    with pytest.raises(ConfigError, match=r"^weights.whole_every_versions: it must be an integer >= 1 or 'auto', got .*; use 1 to write"):
        load_config(None, [("weights.whole_every_versions", text)])


@pytest.mark.parametrize("section, values, told", [
    ("model", {"lora": {"rank": 4}}, "model.lora.rank = 4"), ("inference", {"engine": "sglang"}, "inference.engine = 'sglang'"),
])
def test_changes_of_weights_are_for_whole_models_in_the_embedded_engine_and_vllm(section, values, told):
    weights = {"whole_every_versions": 5}
    for channel, engine in product(("disk", "collective"), ("embedded", "vllm")):
        config = Config.model_validate({"weights": weights | {"channel": channel}, "inference": {"engine": engine}})
        assert config.weights.whole_every_versions == 5
    told = rf"weights.whole_every_versions must be 1 with {told}, got 5; only embedded and vllm take"
    with pytest.raises(ValidationError, match=told):
        Config.model_validate({section: values, "weights": weights})
