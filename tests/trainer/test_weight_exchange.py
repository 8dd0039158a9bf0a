"""The weights of a model in shards, dealt out: the same bits as gathered whole, together where a checkpoint fuses them."""


import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from offbeat.model.checkpoint_names import published_names
from offbeat.trainer.model_trainer import ModelTrainer
from offbeat.trainer.state import full_state
from offbeat.trainer.weight_exchange import WeightExchange
from ranks import run_alone, run_ranks
from train_samples import TINY, VOCAB, arranged, build_model, build_trainer, configure

MESHES = ("fsdp", "shard2", "tp2", "shard2 tp2", "cp2 tp2")


def _deal(groups, folder):
    for mesh in MESHES:
        _check(build_trainer(groups, folder, mesh=mesh), groups, mesh)


def _check(trainer, groups, case):
    model = trainer.model
    exchange = WeightExchange.of(model, groups)
    assert exchange is not None, case
    for dtype in ("float32", "bfloat16"):
        whole = full_state(model, dtype=dtype, keep=True)
        assert exchange.num_bytes(dtype) == sum(tensor.nbytes for tensor in whole.values())
        for owners in ([0, 1, 2, 3][: groups.world], [0]):
            state = exchange.state(dtype, owners)
            made = exchange.plan(dtype, owners)
            assert sorted(made.owners) == sorted(whole) and list(state) == made.names(groups.rank), case
            for name, tensor in state.items():
                assert torch.equal(tensor, whole[name]) and tensor.dtype == whole[name].dtype, (case, name)
            published = published_names(model, whole)
            for name, tensor in published_names(model, state).items():
                assert torch.equal(tensor, published[name]), (case, name)


@pytest.mark.drill
def test_every_mesh_deals_what_would_be_gathered(tmp_path):
    run_ranks(_deal, world=4, argument=build_model(tmp_path))


def _deal_experts(groups, folder):
    for mesh in ("tp2 ep2", "ep2", "shard2 ep2"):
        there = arranged(groups, mesh)
        trainer = ModelTrainer.build(folder, config=configure(folder, max_tokens_per_microbatch=30), groups=there)
        _check(trainer, there, mesh)


def test_experts_that_are_fused_here_are_published_one_by_one(tmp_path):
    settings = {
        "vocab_size": VOCAB, "hidden_size": TINY.hidden_size, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 12}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3_moe"](**settings)).save_pretrained(tmp_path)
    run_ranks(_deal_experts, world=2, argument=str(tmp_path))


def test_a_rank_that_has_everything_deals_nothing_out(tmp_path):
    folder = build_model(tmp_path)
    assert run_alone(lambda groups, _: WeightExchange.of(build_trainer(groups, folder, precision="bf16_mixed").model, groups)) is None
