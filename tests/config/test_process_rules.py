"""Rules of processes and devices: ranks, engines, and what they share."""

import pytest
from pydantic import ValidationError

from offbeat.config.root import Config


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"inference": {"num_engines": 2, "min_engines": 3}}, "inference.min_engines must be <= the 2 of inference.num_engines, got 3"),
        ({"inference": {"quantization": "int8", "engine": "sglang"}},
         "inference.quantization must be 'none' with inference.engine = 'sglang', got 'int8'; it is for embedded and vllm; a server's own"),
        ({"inference": {"quantization": "int4"}},
         "inference.quantization must be 'none' with inference.engine = 'embedded', got 'int4'; it is for vllm; a server's own form"),
        ({"inference": {"quantization": "fp8", "engine": "vllm"}},
         "model.dtype must be 'bfloat16' or 'auto' with inference.quantization = 'fp8', got 'float32'; vllm makes that form of no other"),
        ({"inference": {"quantization": "int8", "urls": ["http://there:1"]}},
         "inference.quantization must be 'none' with inference.urls, got 'int8'; start those engines in that form, and"),
        ({"inference": {"quantization": "int8", "devices_per_engine": 1}},
         "inference.quantization must be 'none' with inference.devices_per_engine = 1, got 'int8'; it is for engines on CPUs"),
        ({"inference": {"quantization": "int8", "forward": "hf"}}, "must be 'none' with inference.forward = 'hf', got 'int8'; only the"),
        ({"train": {"num_ranks": 6, "parallel": {"shard": 2, "cp": 2}}},
         r"train.num_ranks must be a multiple of train.parallel's shard \* tp \* cp = 4, got 6; start as many"),
        ({"run": {"mode": "spmd"}, "train": {"num_ranks": 2, "parallel": {"cp": 2}}, "rollout": {"single_rank_load": False}},
         "rollout.single_rank_load must be true with train.parallel.tp or train.parallel.cp above 1"),
        ({"train": {"num_ranks": 4, "parallel": {"tp": 4, "ep": 2}}}, "train.parallel.ep must be 1 or equal train.parallel.tp = 4, got 2"),
        ({"run": {"mode": "spmd"}, "train": {"parallel": {"tp": 4, "ep": 2}}},
         "train.parallel.ep must be 1 or equal train.parallel.tp = 4, got 2"),
        ({"train": {"num_ranks": 4, "parallel": {"cp": 2, "ep": 2}}},
         "train.parallel.ep must be 1 with train.parallel.cp = 2, got 2; experts are dealt to ranks with rows of their own"),
        ({"train": {"num_ranks": 6, "parallel": {"shard": 2, "ep": 4}}},
         "train.parallel.ep must divide the 6 ranks with different rows, got 4; choose a divisor"),
        ({"train": {"num_ranks": 2, "parallel": {"tp": 2}, "compile": True}}, "train.compile must be false with train.parallel.tp = 2"),
        ({"train": {"num_ranks": 2, "parallel": {"ep": 2}, "compile": True}}, "train.compile must be false with train.parallel.ep = 2"),
        ({"model": {"quantization": "int8", "lora": {"rank": 4}}, "train": {"num_ranks": 2, "parallel": {"ep": 2}}},
         "model.quantization must be 'none' with train.parallel.ep = 2, got 'int8'; each rank holds all rounded weights"),
        ({"model": {"lora": {"rank": 4, "targets": ["experts"]}}, "train": {"num_ranks": 2, "parallel": {"ep": 2}}},
         r"model.lora.targets must not have 'experts' with train.parallel.ep = 2, got \['experts'\]; ranks would divide the experts"),
        ({"model": {"lora": {"rank": 4}}, "train": {"gradient_checkpointing": "selective"}},
         "train.gradient_checkpointing must be 'off' or 'full' with model.lora.rank > 0, got 'selective'"),
        ({"train": {"compile": True, "gradient_checkpointing": "full"}},
         "train.gradient_checkpointing must be 'off' with train.compile, got 'full'"),
        ({"model": {"quantization": "nf4"}},
         "model.quantization must be 'none' with model.lora.rank = 0, got 'nf4'; only weights that are frozen beside an adapter are"),
        ({"model": {"quantization": "int8", "lora": {"rank": 4}}, "train": {"num_ranks": 2, "parallel": {"shard": 2}}},
         "model.quantization must be 'none' with train.parallel.shard = 2, got 'int8'; each rank holds all rounded weights"),
        ({"model": {"lora": {"rank": 4}}, "train": {"compile": True}}, "train.compile must be false with model.lora.rank > 0, got true"),
        ({"model": {"lora": {"rank": 4, "dropout": 0.1}}, "train": {"router_aux_loss_coefficient": 0.01}},
         "model.lora.dropout must be 0 with train.router_aux_loss_coefficient > 0, got 0.1; routers choose otherwise"),
        ({"model": {"route_replay": "rollout"}, "inference": {"engine": "sglang"}},
         "model.route_replay must not be 'rollout' with inference.engine = 'sglang', got it; only embedded and vllm returns the experts"),
        ({"model": {"route_replay": "rollout"}, "inference": {"engine": "vllm"}},
         "model.route_replay must not be 'rollout' with inference.engine = 'vllm' and inference.devices_per_engine = 0, got it; vllm"),
        ({"model": {"route_replay": "rollout"}, "inference": {"engine": "vllm", "devices_per_engine": 1, "prefix_caching": False}},
         "model.route_replay must not be 'rollout' with inference.engine = 'vllm' and inference.prefix_caching = false, got it"),
        ({"model": {"route_replay": "rollout"}, "inference": {"engine": "vllm", "devices_per_engine": 1}, "weights": {"interrupt": "keep"}},
         "model.route_replay must not be 'rollout' with inference.engine = 'vllm' and weights.interrupt = 'keep', got it"),
        ({"model": {"support_replay": "rollout"}, "inference": {"engine": "vllm"}},
         "model.support_replay must not be 'rollout' with inference.engine = 'vllm', got it; only embedded returns the tokens among which"),
        ({"model": {"support_replay": "rollout"}, "algorithm": {"preset": "opd"}, "teacher": {"path": "x"}},
         "model.support_replay must not be 'rollout' with algorithm.teacher, got it; a teacher's log-probabilities are those among all"),
        ({"model": {"route_replay": "old_policy"}},
         "model.route_replay must not be 'old_policy' with algorithm.num_minibatches = 1, got it; the only update of a step begins at"),
        ({"model": {"lora": {"rank": 4}}, "train": {"freeze": ["router"]}},
         'train.freeze must not name "router" with model.lora.rank > 0, got it; an adapter trains no routers'),
        ({"train": {"freeze": ["router"], "router_aux_loss_coefficient": 0.1}},
         'train.freeze must not name "router" with train.router_aux_loss_coefficient > 0, which trains routers'),
        ({"model": {"lora": {"rank": 4, "targets": ["experts"]}}, "inference": {"engine": "vllm"}},
         "model.lora.targets must not have 'experts' with inference.engine = 'vllm', got .'experts'.; only embedded serves adapters of"),
        ({"model": {"lora": {"rank": 4, "targets": ["experts"], "dropout": 0.1}}},
         "model.lora.targets must not have 'experts' with model.lora.dropout = 0.1, got .'experts'.; PEFT's form of such adapters"),
        ({"weights": {"channel": "collective"}, "inference": {"engine": "sglang"}},
         "weights.channel must be 'disk' with inference.engine = 'sglang', got 'collective'"),
        ({"inference": {"devices_per_engine": 2}},
         "inference.devices_per_engine must be at most 1 with inference.engine = 'embedded', got 2; use vllm and sglang"),
        ({"cluster": {"share_devices": True, "launcher": "ray"}}, "cluster.share_devices must be false with cluster.launcher = 'ray'"),
        ({"cluster": {"take_turns": True, "launcher": "ray"}},
         "cluster.take_turns must be false with cluster.launcher = 'ray', got true; Ray gives every process devices of its own"),
        ({"cluster": {"take_turns": True}, "inference": {"urls": ["http://there:1"]}},
         "cluster.take_turns must be false with inference.urls, got true; only engines that the run has started share its devices"),
        ({"cluster": {"take_turns": True}, "inference": {"engine": "sglang"}},
         "cluster.take_turns must be false with inference.engine = 'sglang', got true; embedded and vllm can be put to sleep"),
        ({"cluster": {"take_turns": True}, "run": {"mode": "spmd"}, "rollout": {"single_rank_load": False, "balance_batch": False}},
         "cluster.take_turns must be false with rollout.single_rank_load = false, got true; ranks would wait for rollouts of sleeping"),
        ({"cluster": {"take_turns": True}, "weights": {"interrupt": "drain"}},
         "cluster.take_turns must be false with weights.interrupt = 'drain', got true; an engine that has slept has no cache"),
        ({"rollout": {"single_rank_load": False}}, "rollout.single_rank_load must be true with run.mode = 'controller', got false"),
        ({"run": {"mode": "spmd"}, "rollout": {"single_rank_load": False}},
         "rollout.balance_batch must be false with rollout.single_rank_load = false, got true; no rank has the whole batch"),
    ],
)
def test_processes_that_do_not_go_together_are_refused(values, sentence):
    with pytest.raises(ValidationError, match=sentence):
        Config.model_validate(values)


def test_processes_at_the_edge_of_these_rules_are_allowed():
    Config.model_validate({"inference": {"num_engines": 2, "min_engines": 2}})
    Config.model_validate({"run": {"mode": "spmd"}, "rollout": {"single_rank_load": False, "balance_batch": False}})
    Config.model_validate({"rollout": {"balance_batch": False}})
