"""Which rewards judge a run and its sets, and the devices that they take."""

from pathlib import Path

import pytest

from offbeat.config.load import load_config
from offbeat.controller.reward_choice import choose_rewards, devices_per_reward_model, num_set_reward_models
from offbeat.user_code.functions import resolve
from small_run import small_config


@pytest.mark.parametrize(("settings", "name"), [
    ({"data.task": "countdown"}, "countdown"), ({"data.task": "addition"}, "exact_match"), ({"data.path": "a.jsonl"}, "exact_match"),
    ({"data.path": "a.jsonl", "data.format": "gsm8k"}, "math_reward"),
])
def test_the_reward_suits_the_data_unless_one_is_given(settings: dict[str, str], name: str) -> None:
    [(chosen, weight)] = choose_rewards(load_config(None, list(settings.items()))).items()
    assert chosen.endswith(f":{name}") and weight == 1.0
    assert callable(resolve(chosen, kind="reward"))
    assert choose_rewards(load_config(None, [*settings.items(), ("rollout.reward", "mine:score")])) == {"mine:score": 1.0}
    several = load_config(None, [*settings.items(), ("rollout.rewards", '{math = 1.0, "my.py:short" = 0.2}')])
    assert choose_rewards(several) == {"offbeat.rollout.rewards.math:math_reward": 1.0, "my.py:short": 0.2}


def test_only_reward_models_that_the_run_does_not_have_take_accelerators_for_evaluation_sets(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, rollout__reward="model:ours", evaluate__sets__same__num_prompts="2", evaluate__sets__own__rollout__reward="own.py:reward",
        evaluate__sets__other__rollout__reward="model:other", evaluate__sets__other__rollout__reward_workers="3",
        evaluate__sets__again__rollout__reward="model:other", evaluate__sets__again__rollout__reward_workers="3")
    assert num_set_reward_models(config) == 3
    assert num_set_reward_models(small_config(tmp_path)) == 0


def test_a_reward_model_has_a_device_where_ranks_or_engines_have_one(tmp_path: Path) -> None:
    assert devices_per_reward_model(small_config(tmp_path)) == 0
    assert devices_per_reward_model(small_config(tmp_path, train__devices_per_rank="1", inference__urls='["http://there:1"]')) == 1
    assert devices_per_reward_model(small_config(tmp_path, inference__engine="vllm", inference__devices_per_engine="2")) == 1
