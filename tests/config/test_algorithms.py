"""[algorithm]: presets, the names of earlier versions, and what a step must compute."""

import pytest
from pydantic import ValidationError

from offbeat.config.algorithms import AlgorithmConfig, FilterConfig
from offbeat.config.presets import PRESETS


def test_the_default_is_grpo():
    assert AlgorithmConfig() == AlgorithmConfig(preset="grpo")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_fills_exactly_what_it_names_and_a_given_field_wins(preset):
    filled, default, named = AlgorithmConfig(preset=preset).model_dump(), AlgorithmConfig().model_dump(), PRESETS[preset].settings
    implied = {"preset", "filters", "drop_zero_advantage"}
    assert {name: filled[name] for name in named if name != "filters"} == {name: named[name] for name in named if name != "filters"}
    assert all(filled[name] == default[name] for name in filled.keys() - named.keys() - implied)
    assert AlgorithmConfig(preset=preset, loss_aggregation="fixed_length").loss_aggregation == "fixed_length"


def test_a_presets_filters_are_checked_as_those_of_a_file():
    assert AlgorithmConfig(preset="kpop").filters == (FilterConfig(metric="binary_kl", high=2.0),)
    assert AlgorithmConfig(preset="kpop", filters=()).filters == ()


def test_the_lower_clip_may_be_all_of_the_ratio():
    assert AlgorithmConfig(clip_low=0.0).clip_low == 0
    assert AlgorithmConfig(clip_low=1.0).clip_low == 1
    with pytest.raises(ValidationError):
        AlgorithmConfig(clip_low=1.01)


@pytest.mark.parametrize(("old", "new"), [
    ({"scale_by_std": True}, {"scale": "group_std"}), ({"scale_by_std": False}, {"scale": "none"}),
    ({"behave_weight": "none"}, {"weight": "none"}),
    ({"behave_weight": "clamp", "behave_cap": 2.0}, {"weight": "clamp", "weight_high": 2.0}),
    ({"preset": "dr_grpo", "scale_by_std": True}, {"preset": "dr_grpo", "scale": "group_std"}),
    ({"scale_by_std": True, "scale": "batch_std"}, {"scale": "batch_std"}),
])
def test_a_file_of_an_earlier_version_means_what_it_meant(old, new):
    assert AlgorithmConfig.model_validate(old) == AlgorithmConfig.model_validate(new)


@pytest.mark.parametrize("old", [{"scale_by_std": "yes"}, {"behave_weight": "half"}, {"behave_cap": -1}])
def test_a_wrong_value_under_an_earlier_name_is_refused(old):
    with pytest.raises(ValidationError):
        AlgorithmConfig.model_validate(old)


@pytest.mark.parametrize("term", [
    {"kl_loss": "k3"}, {"reward_kl": 0.1}, {"entropy_coefficient": 0.1}, {"entropy_target": 0.2}, {"drift_coefficient": 0.1},
    {"cov_control": "clip"}, {"imitation_coefficient": 0.1}, {"teacher": "model"}])
def test_sequences_of_advantage_0_stay_where_a_term_acts_on_them(term):
    assert not AlgorithmConfig(**term).drop_zero_advantage
    assert AlgorithmConfig(**term, drop_zero_advantage=True).drop_zero_advantage  # refused by the whole configuration
    words = {"kl_loss", "cov_control", "teacher"}
    assert AlgorithmConfig(**dict.fromkeys(term, "none" if words & term.keys() else 0)).drop_zero_advantage


@pytest.mark.parametrize(("values", "needs"), [
    ({}, ""), ({"num_minibatches": 2}, "prox"), ({"num_minibatches": 2, "anchor": "rollout", "weight": "none"}, ""),
    ({"num_minibatches": 2, "objective": "reinforce"}, "prox"), ({"num_minibatches": 2, "objective": "reinforce", "weight": "none"}, ""),
    ({"num_minibatches": 2, "objective": "reinforce", "weight": "none", "kl_loss": "ratio_k3"}, "prox reference"),
    ({"num_minibatches": 2, "objective": "reinforce", "weight": "none", "filters": [{"metric": "opsm"}]}, ""),
    ({"num_minibatches": 2, "objective": "reinforce", "weight": "none", "filters": [{"metric": "k3"}]}, "prox"),
    ({"preset": "m2po"}, "prox"), ({"preset": "reinforce_pp"}, "reference"), ({"preset": "deepseek_v32"}, "reference"),
    ({"entropy_coefficient": 0.1}, "entropy"), ({"entropy_target": 0.2}, "entropy"),
    ({"cov_control": "clip"}, "prox"), ({"cov_control": "kl", "objective": "importance_sampling", "num_minibatches": 2}, "prox"),
    ({"objective": "a.py:f"}, ""), ({"objective": "a.py:f", "num_minibatches": 2}, "prox"),
    ({"objective": "a.py:f", "objective_reads": ["reference", "entropy"]}, "reference entropy"),
    ({"entropy_coefficient": 0.1}, "entropy"), ({"preset": "opd"}, "teacher"), ({"preset": "sdft"}, "reference teacher"),
    ({"preset": "sdft", "teacher": "policy", "num_minibatches": 2}, "prox teacher"),
    ({"preset": "opd", "objective": "forward_kl", "filters": [], "num_minibatches": 2}, "teacher"),
])
def test_a_step_computes_what_the_settings_need(values, needs):
    config = AlgorithmConfig(**values)
    found = {"prox": config.needs_prox_pass, "reference": config.needs_reference, "entropy": config.needs_entropy,
             "teacher": config.needs_teacher}
    assert [name for name, needed in found.items() if needed] == needs.split()


def test_constants_are_added_to_those_of_a_preset_and_may_be_left_out():
    assert AlgorithmConfig(constants={"tau": 1.0}).constants == {"tau": 1.0}
    assert AlgorithmConfig().constants == {}
