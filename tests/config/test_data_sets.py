"""[data.sets.NAME]: what a data set has of the run, and what is refused."""

import pytest

from offbeat.config.dump import dump_toml
from offbeat.config.evaluation_sets import setting_of
from offbeat.config.load import load_config
from offbeat.errors import ConfigError

FILE = """
[data]
heldout_size = 8
[data.sets.maths]
path = "maths.jsonl"
weight = 3
prompt = "{question}"
rollout = {reward = "math"}
[data.sets.chats]
path = "chats"
chat_template = true
chat_template_kwargs = {enable_thinking = false}
heldout_size = 0
[data.sets.games]
task = "seeds"
[data.sets.games.rollout]
workflow = "gym"
rewards = {exact_match = 1.0}
[data.sets.games.agent]
environment = "game.py:Game"
[rollout]
reward = "exact_match"
reward_timeout_s = 3
"""


def test_a_set_has_what_it_gives_and_of_other_sections_what_the_run_has(tmp_path):
    (tmp_path / "c.toml").write_text(FILE)
    config = load_config(str(tmp_path / "c.toml"))
    maths, chats, games = map(config.data_set, config.data.sets)
    assert (maths.data.path, maths.data.prompt, maths.data.heldout_size) == ("maths.jsonl", "{question}", 8)
    assert (chats.data.chat_template, chats.data.chat_template_kwargs, chats.data.heldout_size) == (True, {"enable_thinking": False}, 0)
    assert (maths.rollout.reward, chats.rollout.reward, games.rollout.reward) == ("math", "exact_match", "")
    assert games.rollout.rewards == {"exact_match": 1.0} and games.rollout.reward_timeout_s == 3
    assert (games.rollout.workflow, games.agent.environment) == ("gym", "game.py:Game")
    assert not maths.data.sets and not games.evaluate.sets
    (tmp_path / "d.toml").write_text(dump_toml(config))
    assert load_config(str(tmp_path / "d.toml")) == config


def test_a_key_of_a_set_is_given_on_the_command_line_as_its_setting():
    config = load_config(None, [("data.sets.a.path", "12"), ("data.sets.a.weight", "2"), ("data.sets.a.rollout.reward", "math")])
    assert config.data_set("a").data.path == "12" and config.data_set("a").rollout.reward == "math"
    assert setting_of("data.sets.a.path") == "data.path" and setting_of("data.sets.a.rollout.reward") == "rollout.reward"


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"data.sets.A.path": "x"}, "data.sets must have names of lower case letters, digits and '_', got 'A'"),
    ({"data.sets.a.weight": "1"}, "data.sets.a must have a path or a task; it says which rows there are"),
    ({"data.sets.a.path": "x", "data.sets.a.weight": "0"}, "data.sets.a.weight must be a number above 0, got 0"),
    ({"data.sets.a.path": "x", "data.sets.a.weigth": "1"},
     "data.sets.a.weigth is not a setting of a data set; did you mean data.sets.a.weight?"),
    ({"data.sets.a.path": "x", "data.sets.a.reward": "math"}, "did you mean data.sets.a.rollout.reward?"),
    ({"data.sets.a.path": "x", "data.path": "y"}, "data.path must be left out with data.sets, got 'y'; give it in the tables"),
    ({"data.sets.a.path": "x", "data.chat_template": "true"}, "data.chat_template must be left out with data.sets, got True"),
    ({"data.sets.a.path": "x", "data.sets.a.format": "gsm9k"}, "data.sets.a.format must be one of"),
    ({"data.sets.a.path": "x", "data.sets.a.rollout.reward": "maths"}, "data.sets.a.rollout.reward: there is no reward 'maths'"),
    ({"data.sets.a.path": "x", "data.sets.a.rollout": "5"}, "data.sets.a.rollout must be a table of settings, got 5"),
    ({"data.sets.a.path": "x", "curriculum.pools": "true"}, "curriculum.pools must be false with data.sets, got true"),
    ({"data.sets.a.path": "x", "data.sets.a.prompt": "{"}, "data.sets.a.prompt: it has a single '{' at character 0"),
])
def test_what_no_set_can_have_is_refused_with_its_place(settings, sentence):
    with pytest.raises(ConfigError) as caught:
        load_config(None, list(settings.items()))
    assert sentence in str(caught.value)
