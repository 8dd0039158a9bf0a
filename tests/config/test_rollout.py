"""[rollout]: staleness, sampling and dotted names."""

import pytest
from pydantic import ValidationError

from offbeat.config.dump import dump_toml
from offbeat.config.load import load_config
from offbeat.config.rollout import RolloutConfig
from offbeat.errors import ConfigError


def test_the_default_is_asynchronous_by_one_version_and_never_passes_the_bound():
    assert (RolloutConfig().max_head_offpolicyness, RolloutConfig().on_stale) == (1, "wait")
    assert RolloutConfig(max_head_offpolicyness=0).max_head_offpolicyness == 0


def test_the_default_workflow_is_named_by_module_and_function():
    module, _, function = RolloutConfig().workflow.partition(":")
    assert module.startswith("offbeat.rollout.workflows.") and function.isidentifier()


@pytest.mark.parametrize("values", [{"max_head_offpolicyness": -1}, {"group_size": 0}, {"top_p": 1.1}, {"on_stale": "x"}])
def test_values_out_of_range_are_refused(values):
    with pytest.raises(ValidationError):
        RolloutConfig(**values)


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"rollout.reward": "exact_mach"},
     "rollout.reward: there is no reward 'exact_mach'; use one of exact_match, math, countdown, reasoning,"
     " 'path/to/file.py:function', or 'model:' before the folder or hub id of a reward model; did you mean 'exact_match'?"),
    ({"rollout.reward": '["math", "math"]'}, "rollout.reward names 'math' twice; give it once, or with its weight"),
    ({"rollout.reward": "[]"}, "rollout.reward is [] and names no reward; give one, or leave it out"),
    ({"rollout.reward": '["math"]', "rollout.rewards": "{countdown = 1}"}, "exclude each other, got math and countdown"),
    ({"rollout.reward": "[3]"}, "rollout.reward must be a list of names of rewards, got 3 in it"),
    ({"rollout.workflow": "tool_lop"},
     "rollout.workflow: there is no workflow 'tool_lop'; use one of single_turn, agent, gym, tool_loop, or 'path/to/file.py:function'; did"
     " you mean 'tool_loop'?"),
    ({"rollout.rewards": "{maths = 1}"}, "rollout.rewards: there is no reward 'maths'; use one of"),
    ({"rollout.rewards": '{math = 1}', "rollout.reward": "math"},
     "rollout.reward and rollout.rewards exclude each other, got 'math' and math"),
    ({"rollout.rewards": '{"model:folder" = 1}'}, "a reward model cannot be one of several rewards, got 'model:folder'"),
    ({"rollout.rewards": '{"a.py:f" = 1, "b.py:f" = 1}'}, "metrics are named after functions, and two are called 'f'; rename one of them"),
    ({"rollout.rewards": '{"judge:a/style.toml" = 1, "b.py:style" = 1}'}, "two are called 'style'"),
    ({"rollout.rewards": '{math = 0}'}, "the weight of 'math' must not be 0"),
    ({"rollout.rewards": '{math = "x"}'}, "rollout.rewards.math must be a number, got 'x'"),
    ({"rollout.rewards": '{math = 1, "b.py:f" = 0.5}', "algorithm.preset": "gdpo"},
     "rollout.rewards must have equal weights with algorithm.separate_rewards and algorithm.scale = 'group_std', got 0.5, 1; each"),
])
def test_rewards_and_workflows_that_cannot_be_are_refused(settings, sentence):
    with pytest.raises(ConfigError) as caught:
        load_config(None, list(settings.items()))
    assert sentence in str(caught.value)


def test_several_rewards_are_written_as_a_file_that_loads(tmp_path):
    config = load_config(None, [("rollout.rewards", '{math = 1.0, "my file.py:short" = -0.2}')])
    (tmp_path / "c.toml").write_text(dump_toml(config))
    assert load_config(str(tmp_path / "c.toml")) == config
    assert config.rollout.rewards == {"math": 1.0, "my file.py:short": -0.2}


@pytest.mark.parametrize(("given", "weights"), [
    ({"reward": ["math", "a.py:f"]}, {"math": 1.0, "a.py:f": 1.0}), ({"reward": {"math": 0.3, "a.py:f": 1}}, {"math": 0.3, "a.py:f": 1.0}),
    ({"rewards": ["math", "a.py:f"]}, {"math": 1.0, "a.py:f": 1.0}), ({"reward": {"math": 2}}, {"math": 2.0}), ({"reward": ["math"]}, {})])
def test_several_rewards_may_be_given_under_the_name_of_one(given, weights):
    config = RolloutConfig(**given)
    assert (config.rewards, config.reward) == (weights, "" if weights else "math")


def test_several_rewards_may_be_given_in_every_place_of_one(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[rollout.reward]\nmath = 0.5\n"a.py:f" = 1\n[evaluate.sets.hard]\nrollout = {reward = ["math", "countdown"]}\n')
    config = load_config(str(file))
    assert config.rollout.rewards == {"math": 0.5, "a.py:f": 1.0}
    assert config.evaluation_set("hard").rollout.rewards == {"math": 1.0, "countdown": 1.0}
    assert load_config(str(file), [("rollout.reward", '["math", "countdown"]'), ("rollout.rewards", "{}")]).rollout.rewards == {
        "math": 1.0, "countdown": 1.0}
