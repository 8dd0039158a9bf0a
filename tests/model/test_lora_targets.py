"""Which layers adapters train: by the last parts of their names, by kind, and experts only where they are named."""

import pytest
import torch

from offbeat.errors import ModelError
from offbeat.model.load import load_causal_lm
from offbeat.model.lora import AdapterBank
from offbeat.model.lora_targets import find_expert_layers, find_targets, layer_kind
from train_samples import build_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("model"))


def test_targets_are_last_parts_of_names(folder):
    model = load_causal_lm(folder)
    assert [name.split(".")[2] + name.rpartition(".")[2] for name in find_targets(model, ("q_proj", "mlp.up_proj"))] == [
        "0q_proj", "0up_proj", "1q_proj", "1up_proj"]
    assert len(find_targets(model, ("all-linear",))) == 14
    for unknown in ("lm_head", "proj", "query"):
        with pytest.raises(ModelError, match=f"has '{unknown}', which is not a linear layer .*; use down_proj, .*v_proj or all-l"):
            AdapterBank(model, rank=2, targets=("q_proj", unknown))
    with pytest.raises(ModelError, match="Linear has no linear layers in its decoder's layers"):
        find_targets(torch.nn.Linear(2, 2), ("all-linear",))


@pytest.mark.parametrize("name, kind", [
    ("model.layers.0.self_attn.q_proj", "attn"), ("model.layers.0.linear_attn.in_proj_qkvz", "attn"),
    ("gpt_neox.layers.0.attention.dense", "attn"),
    ("model.layers.0.mlp.gate_proj", "mlp"), ("model.layers.0.mlp.shared_expert.up_proj", "mlp"), ("model.decoder.layers.3.fc1", "mlp"),
    ("model.layers.0.block_sparse_moe.experts.0.w1", "mlp"), ("model.layers.0.feed_forward.w2", "mlp")])
def test_layers_are_of_two_kinds(name, kind):
    assert layer_kind(name) == kind


def test_experts_are_named_by_a_word_of_their_own(folder):
    model = load_causal_lm(folder)
    assert find_targets(model, ("experts",)) == {} and find_expert_layers(model, ("all-linear",)) == []
    with pytest.raises(ModelError, match="Qwen3ForCausalLM has no experts that are fused; leave .experts. out of model.lora"):
        find_expert_layers(model, ("experts",))
