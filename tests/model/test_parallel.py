"""Models of several families that are divided over a tensor group train as on one process, or are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from offbeat.errors import ModelError
from offbeat.sync.mesh import MeshShape
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.strategies import choose
from ranks import run_alone, run_ranks
from train_samples import TINY, VOCAB, arranged, configure, make_batch, own_share, take_step

SIZES = {
    "vocab_size": VOCAB, "hidden_size": TINY.hidden_size, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
FAMILIES = {
    "llama": {}, "gemma2": {"sliding_window": 6}, "qwen2": {"tie_word_embeddings": True}, "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4, "sliding_window": None}}
MIXTURES = ("qwen3_moe", "mixtral")


def build(folder):
    """A random model of each family, each in a folder of its name."""
    for family, settings in FAMILIES.items():
        with torch.random.fork_rng():
            torch.manual_seed(1)
            AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES | settings)).save_pretrained(f"{folder}/{family}")
    return str(folder)


def _train(groups, folder):
    """By family: losses, gradient norms, entropies and numbers of targets of two steps, a canary, and the weights' square."""
    if groups.world == 2:  # a plan that slices embeddings, but does not name the head that has their weights
        Qwen2Config.base_model_tp_plan["embed_tokens"] = "embedding_rowwise"
        Qwen2ForCausalLM._tp_plan = {}
    found = {family: _train_one(groups, f"{folder}/{family}", mesh="tp2 ep2" if family in MIXTURES else "tp2") for family in FAMILIES}
    if groups.world == 2:
        Qwen2Config.base_model_tp_plan["embed_tokens"] = "embedding_colwise"
        with pytest.raises(ModelError, match="Qwen2ForCausalLM shares its head with embeddings that transformers' plan slices by width"):
            _train_one(groups, f"{folder}/qwen2", mesh="tp2")
    return found


def _train_one(groups, folder, *, mesh):
    there = groups if groups.world == 1 else arranged(groups, mesh)
    trainer = ModelTrainer.build(folder, config=configure(folder, max_tokens_per_microbatch=30), groups=there)
    steps = []
    for seed in range(2):
        part, micros = own_share(trainer, make_batch(3, 4, seed=seed), max_tokens=30)
        metrics = take_step(trainer, part, [micros])
        steps.append([metrics[f"train/{name}"] for name in ("loss", "grad_norm", "entropy", "tokens")])
    state = trainer.snapshot("float32").state.values()
    return steps, trainer.canary([3, 4, 5, 6]), sum(tensor.double().pow(2).sum().item() for tensor in state)


@pytest.mark.drill
def test_two_ranks_that_share_each_layer_train_as_one_does(tmp_path):
    folder = build(tmp_path)
    alone = run_alone(_train, argument=folder)
    both = run_ranks(_train, world=2, argument=folder)
    for family, (steps, canary, square) in alone.items():
        for rank, (own_steps, own_canary, own_square) in enumerate(found[family] for found in both):
            np.testing.assert_allclose(own_steps, steps, rtol=1e-5, atol=1e-5, err_msg=family)
            np.testing.assert_allclose(own_canary, canary, rtol=1e-5, atol=1e-5, err_msg=family)
            assert own_square == (pytest.approx(square, rel=1e-5) if rank == 0 else 0)


@pytest.mark.parametrize(("family", "changes", "shape", "sentence"), [
    ("gpt2", {"n_head": 4}, MeshShape(1, tp=2), "transformers has no plan to divide GPT2LMHeadModel by tensors; set train.parallel.tp"),
    ("llama", {}, MeshShape(1, tp=2, ep=2), "transformers has no plan to divide the experts of LlamaForCausalLM; set train.parallel.ep"),
    ("llama", {}, MeshShape(1, tp=4), "train.parallel.tp must divide num_key_value_heads = 2 of LlamaForCausalLM, got 4; use a divisor"),
    ("qwen3_moe", EXPERTS, MeshShape(1, tp=2), r"Qwen3MoeForCausalLM fuses weights \(.*gate_up_proj\) whose slices interleave,"
     " which checkpoints cannot hold; set train.parallel.ep = train.parallel.tp"),
])
def test_a_model_that_transformers_cannot_divide_is_refused(family, changes, shape, sentence):
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES | changes))

    class Mesh:
        """As much of a mesh as is looked at before anything is divided."""

        def __getitem__(self, _name):
            return self

        def size(self):
            return shape.tp

    with pytest.raises(ModelError, match=sentence):
        run_alone(lambda groups, _: choose(model, groups=replace(groups, shape=shape, mesh=Mesh())))
