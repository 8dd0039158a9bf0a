"""[critic]: bounds, and what a critic excludes."""

import pytest
from pydantic import ValidationError

from offbeat.config.critic import CriticConfig
from offbeat.config.root import Config


@pytest.mark.parametrize("values", [{"warmup_steps": -1}, {"value_clip": -0.1}, {"optimizer": {"lr": 0}}])
def test_values_without_meaning_are_refused(values):
    with pytest.raises(ValidationError):
        CriticConfig(**values)


def test_a_critic_needs_no_group_and_learns_from_all_tokens():
    config = Config.model_validate({"algorithm": {"preset": "ppo"}, "rollout": {"group_size": 1}})
    assert config.algorithm.needs_critic and config.algorithm.needs_scores and not config.algorithm.drop_zero_advantage


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"scale": "group_std"}, "algorithm.scale must be 'none' with algorithm.centre = 'critic', got 'group_std'"),
    ({"separate_rewards": True}, "algorithm.separate_rewards must be false with algorithm.centre = 'critic', got true"),
    ({"drop_zero_advantage": True}, "algorithm.drop_zero_advantage must be false with algorithm.centre = 'critic', got true"),
    ({"whiten": "sequences"}, "algorithm.whiten must be 'none' or 'tokens' with algorithm.centre = 'critic', got 'sequences'"),
    ({"objective": "cross_entropy"}, "algorithm.objective must be one that reads advantages with algorithm.centre = 'critic'"),
    ({"credit": "a.py:f"}, "algorithm.credit must be empty with algorithm.centre = 'critic', got 'a.py:f'")])
def test_what_contradicts_a_critic_is_refused(settings, sentence):
    with pytest.raises(ValidationError, match=sentence):
        Config.model_validate({"algorithm": {"preset": "ppo", **settings}})


def test_a_warm_up_leaves_steps_for_the_policy():
    with pytest.raises(ValidationError, match=r"critic.warmup_steps must be below run.total_steps = 3, got 3"):
        Config.model_validate({"algorithm": {"preset": "vapo"}, "critic": {"warmup_steps": 3}, "run": {"total_steps": 3}})
