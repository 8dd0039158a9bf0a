"""The whole configuration and the rules that span sections."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from offbeat.config.root import Config


def test_folders_follow_from_names():
    config = Config.model_validate({"run": {"dir": "out", "name": "first"}})
    assert config.run_dir == Path("out/first")
    assert config.weights_dir == Path("out/first/weights")
    first, again, elsewhere = (
        Config.model_validate({"weights": {"dir": "/dev/shm/w"}, "run": {"name": "first", "dir": folder}}).weights_dir
        for folder in ("out", "out", "other"))
    assert first.parent == Path("/dev/shm/w") and first.name.startswith("first-")
    assert first == again != elsewhere, "two runs never publish into one folder"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"model": {"tiny": {"num_heads": 6, "num_kv_heads": 4}}}, "model.tiny.num_kv_heads must divide num_heads = 6, got 4"),
        ({"data": {"task": "addition", "path": "a.jsonl"}}, "data.task and data.path exclude each other, got 'addition' and 'a.jsonl'"),
        ({"rollout": {"group_size": 0}}, "greater than or equal to 1"),
        ({"algorithm": {"preset": "reinforce_pp", "dynamic_sampling": True}, "rollout": {"group_size": 1}},
         "algorithm.dynamic_sampling must be false with rollout.group_size = 1, got true"),
        ({"curriculum": {"pools": True}, "data": {"task": "addition"}},
         "curriculum.pools must be false with data.task = 'addition', got true; a task makes new rows without end"),
        ({"curriculum": {"leave_at": 0.9}, "data": {"task": "addition"}},
         "curriculum.leave_at must be 0 with data.task = 'addition', got 0.9"),
        ({"curriculum": {"hard_up_to": 0.8}}, "curriculum.hard_up_to must be at most normal_up_to = 0.75, got 0.8"),
        ({"rollout": {"temperature": 0}}, "greater than 0"),
        ({"rollout": {"stop": ["a", ""]}}, "rollout.stop must not hold an empty string"),
        ({"rollout": {"reward_timeout_s": 600}}, "rollout.episode_timeout_s must be above rollout.reward_timeout_s = 600, got 600"),
        ({"weights": {"interrupt": "drain"}}, "weights.switch_timeout_s must be at least 256 with weights.interrupt = 'drain', got 60"),
        ({"rollout": {"batch_timeout_s": 599}}, "rollout.batch_timeout_s must be at least rollout.episode_timeout_s = 600, got 599"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values, sentence):
    with pytest.raises(ValidationError, match=sentence):
        Config.model_validate(values)


def test_settings_at_the_edge_of_these_rules_are_allowed():
    Config.model_validate({"weights": {"interrupt": "drain", "switch_timeout_s": 256}})
    Config.model_validate({"weights": {"interrupt": "drain"}, "model": {"lora": {"rank": 4}}})  # adapters are not switched


def test_timeouts_grow_with_the_longest_answer_that_is_allowed():
    def timeouts(**rollout):
        config = Config.model_validate({"rollout": rollout})
        return config.timed_rollout.episode_timeout_s, config.timed_rollout.batch_timeout_s, config.timed_evaluate.timeout_s

    assert timeouts() == (600, 1800, 600)
    assert timeouts(max_new_tokens=1000) == (1015, 1800, 1015)
    assert timeouts(max_new_tokens=4000) == (4015, 4015, 4015)
    assert timeouts(max_new_tokens=20, episode_timeout_s=60, batch_timeout_s=90) == (60, 90, 600)
    turns = Config.model_validate({
        "rollout": {"workflow": "gym", "max_new_tokens": 1000}, "agent": {"environment": "mine.py:Mine", "max_turns": 3}})
    assert turns.timed_rollout.episode_timeout_s == 3 * 1000 + 15
    fast = Config.model_validate({"rollout": {"max_new_tokens": 4000}, "inference": {"token_timeout_s": 0}})
    assert (fast.timed_rollout, fast.timed_evaluate) == (fast.rollout, fast.evaluate)
