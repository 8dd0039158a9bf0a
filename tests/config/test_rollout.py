"""[rollout]: staleness, sampling and dotted names."""

import pytest
from pydantic import ValidationError

from offbeat.config.load import dump_toml, load_config
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
     " or 'path/to/file.py:function'; did you mean 'exact_match'?"),
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
