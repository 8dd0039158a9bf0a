"""The whole configuration and the rules that span sections."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from offbeat.config.root import Config

TOP_K = {"preset": "opd", "objective": "forward_kl", "filters": []}


def test_folders_follow_from_names():
    config = Config.model_validate({"run": {"dir": "out", "name": "first"}})
    assert config.run_dir == Path("out/first")
    assert config.weights_dir == Path("out/first/weights")
    assert Config.model_validate({"weights": {"dir": "/dev/shm/w"}}).weights_dir == Path("/dev/shm/w")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"inference": {"num_engines": 2, "min_engines": 3}}, "inference.min_engines must be <= the 2 of inference.num_engines, got 3"),
        ({"model": {"tiny": {"num_heads": 6, "num_kv_heads": 4}}}, "model.tiny.num_kv_heads must divide num_heads = 6, got 4"),
        ({"algorithm": {"dual_clip": 0.5}}, r"algorithm.dual_clip must be 0 \(off\) or > 1, got 0.5"),
        ({"train": {"num_ranks": 6, "parallel": {"shard": 2, "cp": 2}}},
         r"train.num_ranks must be a multiple of train.parallel's shard \* tp \* cp = 4, got 6; start as many"),
        ({"run": {"mode": "spmd"}, "train": {"num_ranks": 2, "parallel": {"cp": 2}}, "rollout": {"single_rank_load": False}},
         "rollout.single_rank_load must be true with train.parallel.tp or train.parallel.cp above 1"),
        ({"train": {"num_ranks": 4, "parallel": {"tp": 4, "ep": 2}}}, "train.parallel.ep must be 1 or equal train.parallel.tp = 4, got 2"),
        ({"run": {"mode": "spmd"}, "train": {"parallel": {"tp": 4, "ep": 2}}},
         "train.parallel.ep must be 1 or equal train.parallel.tp = 4, got 2"),
        ({"train": {"num_ranks": 2, "parallel": {"tp": 2}, "compile": True}}, "train.compile must be false with train.parallel.tp = 2"),
        ({"model": {"lora": {"rank": 4}}, "train": {"gradient_checkpointing": "selective"}},
         "train.gradient_checkpointing must be 'off' or 'full' with model.lora.rank > 0, got 'selective'"),
        ({"train": {"compile": True, "gradient_checkpointing": "full"}},
         "train.gradient_checkpointing must be 'off' with train.compile, got 'full'"),
        ({"model": {"lora": {"rank": 4}}, "train": {"compile": True}}, "train.compile must be false with model.lora.rank > 0, got true"),
        ({"weights": {"channel": "collective"}, "inference": {"engine": "sglang"}},
         "weights.channel must be 'disk' with inference.engine = 'sglang', got 'collective'"),
        ({"inference": {"devices_per_engine": 2}},
         "inference.devices_per_engine must be at most 1 with inference.engine = 'embedded', got 2; use vllm or sglang"),
        ({"cluster": {"share_devices": True, "launcher": "ray"}}, "cluster.share_devices must be false with cluster.launcher = 'ray'"),
        ({"cluster": {"take_turns": True, "launcher": "ray"}},
         "cluster.take_turns must be false with cluster.launcher = 'ray', got true; Ray gives every process devices of its own"),
        ({"cluster": {"take_turns": True}, "inference": {"urls": ["http://there:1"]}},
         "cluster.take_turns must be false with inference.urls, got true; only engines that the run has started share its devices"),
        ({"cluster": {"take_turns": True}, "inference": {"engine": "sglang"}},
         "cluster.take_turns must be false with inference.engine = 'sglang', got true; the embedded engine and vLLM can be put to sleep"),
        ({"cluster": {"take_turns": True}, "run": {"mode": "spmd"}, "rollout": {"single_rank_load": False, "balance_batch": False}},
         "cluster.take_turns must be false with rollout.single_rank_load = false, got true; ranks would wait for rollouts of sleeping"),
        ({"cluster": {"take_turns": True}, "weights": {"interrupt": "drain"}},
         "cluster.take_turns must be false with weights.interrupt = 'drain', got true; an engine that has slept has no cache"),
        ({"data": {"task": "addition", "path": "a.jsonl"}}, "data.task and data.path exclude each other, got 'addition' and 'a.jsonl'"),
        ({"rollout": {"single_rank_load": False}}, "rollout.single_rank_load must be true with run.mode = 'controller', got false"),
        ({"run": {"mode": "spmd"}, "rollout": {"single_rank_load": False}},
         "rollout.balance_batch must be false with rollout.single_rank_load = false, got true; no rank has the whole batch"),
        ({"rollout": {"group_size": 0}}, "greater than or equal to 1"),
        ({"algorithm": {"preset": "reinforce_pp", "dynamic_sampling": True}, "rollout": {"group_size": 1}},
         "algorithm.dynamic_sampling must be false with rollout.group_size = 1, got true"),
        ({"curriculum": {"pools": True}, "data": {"task": "addition"}},
         "curriculum.pools must be false with data.task = 'addition', got true; a task makes new rows without end"),
        ({"curriculum": {"leave_at": 0.9}, "data": {"task": "addition"}},
         "curriculum.leave_at must be 0 with data.task = 'addition', got 0.9"),
        ({"curriculum": {"hard_up_to": 0.8}}, "curriculum.hard_up_to must be at most normal_up_to = 0.75, got 0.8"),
        ({"algorithm": {"preset": "ppo", "agent_baselines": True}},
         "algorithm.agent_baselines must be false with algorithm.centre = 'critic', got true"),
        ({"algorithm": {"turn_gamma": 0.9}}, "algorithm.turn_gamma must be 1 with algorithm.turn_credit = 'episode', got 0.9"),
        ({"algorithm": {"preset": "ppo", "turn_credit": "return"}},
         "algorithm.turn_credit must be 'episode' with algorithm.centre = 'critic', got 'return'; a critic credits"),
        ({"algorithm": {"centre": "none", "scale": "none", "turn_credit": "state"}},
         "algorithm.turn_credit must be 'episode' with algorithm.centre = 'none', got 'state'; no rewards are compared there"),
        ({"algorithm": {"objective": "cross_entropy", "turn_credit": "turn"}},
         "algorithm.turn_credit must be 'episode' with algorithm.objective = 'cross_entropy'"),
        ({"algorithm": {"preset": "gigpo", "gamma": 0.9}}, "algorithm.gamma must be 1.0 with algorithm.turn_credit = 'state', got 0.9"),
        ({"algorithm": {"preset": "gigpo", "reward_kl": 0.1}}, "algorithm.reward_kl must be 0.0 with algorithm.turn_credit = 'state'"),
        ({"algorithm": {"preset": "gdpo", "turn_credit": "turn"}},
         "algorithm.separate_rewards must be false with algorithm.turn_credit = 'turn', got true"),
        ({"algorithm": {"turn_credit": "turn", "whiten": "sequences"}},
         "algorithm.whiten must be 'none' or 'tokens' with algorithm.turn_credit = 'turn', got 'sequences'"),
        ({"algorithm": {"credit": "mine.py:mine", "turn_credit": "turn"}},
         "algorithm.turn_credit must be 'episode' with algorithm.credit, got 'turn'"),
        ({"algorithm": {"credit": "mine.py:mine", "agent_baselines": True}},
         "algorithm.agent_baselines must be false with algorithm.credit, got true"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size must be at least 2 with algorithm.centre = 'group', got 1"),
        ({"algorithm": {"centre": "none"}}, "algorithm.scale must be 'none' with algorithm.centre = 'none', got 'group_std'"),
        ({"algorithm": {"preset": "max_rl", "length_penalty": 0.1}}, "length_penalty, .* must be 0 with algorithm.scale = 'group_mean'"),
        ({"algorithm": {"preset": "max_rl", "overlong_buffer_share": 0.1}}, "must be 0 with algorithm.scale = 'group_mean'"),
        ({"algorithm": {"preset": "lite_ppo"}, "run": {"mode": "spmd"}, "rollout": {"single_rank_load": False, "balance_batch": False}},
         "rollout.single_rank_load must be true with algorithm.scale = 'batch_std', got false"),
        ({"algorithm": {"preset": "gdpo"}, "run": {"mode": "spmd"}, "rollout": {"single_rank_load": False, "balance_batch": False}},
         "rollout.single_rank_load must be true with algorithm.whiten = 'sequences', got false"),
        ({"algorithm": {"preset": "m2po"}, "run": {"mode": "spmd"}, "rollout": {"single_rank_load": False, "balance_batch": False}},
         "rollout.single_rank_load must be true with a filter m2, got false"),
        ({"algorithm": {"preset": "raft", "reward_kl": 0.1}}, "algorithm.reward_kl must be 0 with algorithm.objective = 'cross_entropy'"),
        ({"algorithm": {"preset": "cispo", "dual_clip": 3}}, "algorithm.dual_clip must be 0 with algorithm.objective = 'cispo', got 3"),
        ({"algorithm": {"anchor": "rollout"}}, "algorithm.weight must be 'none' with algorithm.anchor = 'rollout', got 'mask'"),
        ({"algorithm": {"weight_low": 6}}, "algorithm.weight_low must be at most weight_high = 5, got 6"),
        ({"algorithm": {"filters": [{"metric": "k2", "low": 2, "high": 1}]}},
         "algorithm.filters: low of k2 must be at most high = 1, got 2"),
        ({"algorithm": {"kl_loss": "k3", "drop_zero_advantage": True}},
         "algorithm.drop_zero_advantage must be false with algorithm.kl_loss, which acts on sequences of advantage 0"),
        ({"algorithm": {"objective": "pppo"}}, "there is no objective 'pppo'; use one of ppo, .*did you mean 'ppo'"),
        ({"algorithm": {"objective_reads": ["entropy"]}}, "algorithm.objective_reads must be empty with algorithm.objective = 'ppo'"),
        ({"algorithm": {"credit": "a.py:f", "whiten": "tokens"}}, "algorithm.whiten must be 'none' with algorithm.credit, got 'tokens'"),
        ({"algorithm": {"credit": "a.py:f", "separate_rewards": True}}, "algorithm.separate_rewards must be false with .*, got true"),
        ({"algorithm": {"credit": "a.py:f", "gamma": 0.9}}, "algorithm.gamma must be 1.0 with algorithm.credit, got 0.9"),
        ({"algorithm": {"credit": "a.py:f", "reward_kl": 0.1}}, "algorithm.reward_kl must be 0.0 with algorithm.credit, got 0.1"),
        ({"algorithm": {"credit": "a.py:f"}, "run": {"mode": "spmd"}, "rollout": {"single_rank_load": False, "balance_batch": False}},
         "rollout.single_rank_load must be true with algorithm.credit, got false"),
        ({"algorithm": {"cov_control": "clip"}, "run": {"mode": "spmd"}, "rollout": {"single_rank_load": False, "balance_batch": False}},
         "rollout.single_rank_load must be true with algorithm.cov_control = 'clip', got false"),
        ({"algorithm": {"kl_target": 0.1}}, "algorithm.kl_target must be 0 without algorithm.kl_loss and algorithm.reward_kl, got 0.1"),
        ({"algorithm": {"cov_control": "clip", "objective": "cispo"}}, "algorithm.objective must be 'ppo' with .*, got 'cispo'"),
        ({"algorithm": {"cov_control": "kl", "num_minibatches": 2}}, "algorithm.objective must be 'importance_sampling' with"),
        ({"algorithm": {"cov_control": "kl", "objective": "importance_sampling"}}, "algorithm.num_minibatches must be at least 2 with"),
        ({"algorithm": {"cov_control": "clip", "cov_low": 5.0}}, "algorithm.cov_low must be below cov_high = 5, got 5"),
        ({"algorithm": {"cov_control": "clip", "drop_zero_advantage": True}},
         "algorithm.drop_zero_advantage must be false with algorithm.cov_control"),
        ({"algorithm": {"preset": "opd"}}, "teacher.path or teacher.url must be given with algorithm.teacher = 'model'"),
        ({"algorithm": {"preset": "opd"}, "teacher": {"path": "a", "url": "http://b"}}, "teacher.path and teacher.url exclude each other"),
        ({"teacher": {"path": "a"}}, "teacher.path must be empty with algorithm.teacher = 'none', which asks no other model, got 'a'"),
        ({"algorithm": {"preset": "sdft"}, "teacher": {"url": "http://b"}}, "teacher.url must be empty with algorithm.teacher = 'ref"),
        ({"algorithm": {"preset": "opd"}, "teacher": {"url": "localhost:1"}}, "teacher.url must begin with http:// or https://, got"),
        ({"algorithm": {"preset": "opd"}, "teacher": {"url": "http://b"}, "rollout": {"temperature": 0.7}},
         "rollout.temperature must be 1 with teacher.url, got 0.7"),
        ({"algorithm": {"preset": "opd"}, "teacher": {"path": "a", "top_k": 5}},
         "teacher.top_k must be 0 with algorithm.objective = 'importance_sampling', got 5"),
        ({"algorithm": TOP_K, "teacher": {"path": "a"}}, "teacher.top_k must be at least 1 with algorithm.objective = 'forward_kl'"),
        ({"algorithm": TOP_K | {"teacher": "policy"}}, "algorithm.teacher must be 'model' with algorithm.objective = 'forward_kl'"),
        ({"algorithm": TOP_K | {"teacher_credit": "added"}, "teacher": {"path": "a", "top_k": 5}},
         "algorithm.teacher_credit must be 'alone' with algorithm.objective = 'forward_kl'"),
        ({"algorithm": {"preset": "opd", "objective": "forward_kl"}, "teacher": {"path": "a", "top_k": 5}},
         r"algorithm.filters must be off with algorithm.objective = 'forward_kl', .* set it to \[\]"),
        ({"algorithm": TOP_K | {"kl_loss": "k3"}, "teacher": {"path": "a", "top_k": 5}}, "algorithm.kl_loss must be off .* to 'none'"),
        ({"algorithm": TOP_K | {"entropy_coefficient": 0.1}, "teacher": {"path": "a", "top_k": 5}},
         "algorithm.entropy_coefficient must be off .* to 0"),
        ({"algorithm": {"preset": "raft", "teacher": "model"}, "teacher": {"path": "a"}},
         "algorithm.teacher must be 'none' with algorithm.objective = 'cross_entropy'"),
        ({"algorithm": {"preset": "opd", "drop_zero_advantage": True}, "teacher": {"path": "a"}},
         "algorithm.drop_zero_advantage must be false with algorithm.teacher"),
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
    Config.model_validate({"inference": {"num_engines": 2, "min_engines": 2}, "algorithm": {"dual_clip": 3.0}})
    Config.model_validate({"run": {"mode": "spmd"}, "rollout": {"single_rank_load": False, "balance_batch": False}})
    Config.model_validate({"rollout": {"balance_batch": False}})
    Config.model_validate({"rollout": {"group_size": 1}, "algorithm": {"preset": "reinforce_pp"}})
    Config.model_validate({"algorithm": {"anchor": "rollout", "weight": "none"}})
    Config.model_validate({"algorithm": {"kl_loss": "k3"}})
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
    fast = Config.model_validate({"rollout": {"max_new_tokens": 4000}, "inference": {"token_timeout_s": 0}})
    assert (fast.timed_rollout, fast.timed_evaluate) == (fast.rollout, fast.evaluate)


def test_a_credit_of_ones_own_may_have_groups_of_one():
    Config.model_validate({"algorithm": {"credit": "a.py:f"}, "rollout": {"group_size": 1}})
