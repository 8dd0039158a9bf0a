"""Which engines are sent changes of weights by default, and why."""

from typing import Any

import pytest

from offbeat.config.for_processes import PlanConfig
from offbeat.config.root import Config
from offbeat.runs.change_choice import change_choice, choose_changes


def configured(*, dtype: str = "bfloat16", **sections: Any) -> PlanConfig:
    model = {"path": "some/model", "dtype": dtype} | sections.pop("model", {})
    return Config.model_validate({"model": model, **sections}).for_plan


VLLM = {"engine": "vllm"}


@pytest.mark.parametrize(("config", "number", "why"), [
    (configured(), 20, "a step changes few weights in bfloat16"),
    (configured(dtype="float32"), 1, "a step changes nearly every weight in float32"),
    (configured(model={"lora": {"rank": 4}}), 1, "adapters are small"),
    (configured(inference={"quantization": "int8"}), 1, "engines keep int8 weights alone, to which no changes can be applied"),
    (configured(inference=VLLM | {"quantization": "int8"}, weights={"channel": "collective"}), 20,
     "a step changes few weights in bfloat16"),
    (configured(inference={"engine": "sglang"}), 1, "sglang takes whole weights only"),
    (configured(inference=VLLM), 1, "vllm would keep a copy of the weights for it, and has whole folders on this machine"),
    (configured(inference=VLLM, weights={"channel": "collective"}), 20, "a step changes few weights in bfloat16"),
    (configured(inference=VLLM | {"urls": ["http://a:1"]}), 20, "a step changes few weights in bfloat16"),
    (configured(inference=VLLM, cluster={"launcher": "ray", "ray_address": "auto"}), 20, "a step changes few weights in bfloat16"),
    (configured(weights={"whole_every_versions": 3}), 3, "as configured"),
    (configured(inference={"engine": "sglang"}, weights={"whole_every_versions": 1}), 1, "as configured")])
def test_changes_are_sent_where_they_are_few_and_save_a_copy_or_a_link(config: PlanConfig, number: int, why: str) -> None:
    found = change_choice(config)
    assert (found.setting, found.value, found.why) == ("weights.whole_every_versions", str(number), why)
    chosen = choose_changes(config)
    assert (chosen.weights.whole_every_versions, chosen.weights.sends_changes) == (number, number > 1)


def test_until_it_is_chosen_every_version_is_whole() -> None:
    assert (configured().weights.longest_chain, configured().weights.sends_changes) == (1, False)
