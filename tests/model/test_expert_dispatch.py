"""Which models have experts that are dealt to ranks; see tests/trainer/test_expert_meshes.py for what they compute."""

from types import SimpleNamespace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from offbeat.errors import ModelError
from offbeat.model.expert_dispatch import deal_experts, dealt_modules

SIZES = {
    "vocab_size": 23, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(("family", "settings", "size", "sentence"), [
    ("llama", {}, 2, "LlamaForCausalLM has no experts that are fused, which could be dealt to ranks; set train.parallel.ep to 1"),
    ("gpt_oss", LOCAL | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}, 2,
     "GptOssForCausalLM has experts of a form that cannot be dealt to ranks; set train.parallel.ep to 1"),
    ("llama4_text", LOCAL | {"attention_chunk_size": 6, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0], "num_experts_per_tok": 1}, 2,
     "Llama4ForCausalLM has experts of a form that cannot be dealt to ranks; set train.parallel.ep to 1"),
    ("mixtral", LOCAL, 3, "train.parallel.ep must divide the 4 experts of MixtralForCausalLM, got 3; use a divisor"),
])
def test_a_model_whose_experts_cannot_be_dealt_is_refused_and_left_as_it_is(family, settings, size, sentence):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES | settings))
    with pytest.raises(ModelError, match=sentence):
        deal_experts(model, SimpleNamespace(size=lambda: size))
    assert not dealt_modules(model)
