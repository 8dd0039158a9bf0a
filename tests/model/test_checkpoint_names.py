"""Names of published checkpoints and of modules, there and back. That every family has the right ones is in `test_families.py`."""

import pytest
import torch

from families import build
from family_table import FAMILIES
from offbeat.model.checkpoint_names import module_names, published_names
from offbeat.model.hf_io import write_safetensors
from offbeat.model.load import load_causal_lm

BY_NAME = {family.name: family for family in FAMILIES}


@pytest.fixture
def load(tmp_path):
    """name -> its tiny model."""
    return lambda name: load_causal_lm(build(BY_NAME[name], str(tmp_path / "model")).folder)


@pytest.mark.parametrize("name", ["Qwen3 MoE", "Mixtral", "Granite MoE", "GPT-NeoX", "Llama 2"])
def test_weights_come_back_as_they_were(load, name):
    model = load(name)
    state = dict(model.named_parameters())
    back = module_names(model, published_names(model, state))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_each_expert_is_published_by_itself(load):
    model = load("Qwen3 MoE")
    published = published_names(model, dict(model.named_parameters()))
    fused = model.model.layers[0].mlp.experts
    prefix = "model.layers.0.mlp.experts"
    assert "model.layers.0.mlp.experts.gate_up_proj" not in published
    for expert in range(4):
        both = torch.cat([published[f"{prefix}.{expert}.{part}_proj.weight"] for part in ("gate", "up")])
        assert torch.equal(both, fused.gate_up_proj[expert])
        assert torch.equal(published[f"{prefix}.{expert}.down_proj.weight"], fused.down_proj[expert])


def test_a_folder_with_fused_experts_is_read_too_and_published_by_each(load, tmp_path):
    model = load("Mixtral")
    write_safetensors(model.state_dict(), tmp_path / "fused", config_from=model)
    state = dict(model.named_parameters())
    assert module_names(model, state).keys() == state.keys()
    again = load_causal_lm(str(tmp_path / "fused"))
    assert published_names(again, dict(again.named_parameters())).keys() == published_names(model, state).keys()


def test_a_part_of_a_state_may_be_converted(load):
    model = load("Qwen3 MoE")
    one = {"model.layers.1.mlp.experts.down_proj": model.model.layers[1].mlp.experts.down_proj}
    assert sorted(published_names(model, one)) == [f"model.layers.1.mlp.experts.{i}.down_proj.weight" for i in range(4)]
