import json

import pytest
from transformers import MambaConfig, PretrainedConfig

from offbeat.config.model import TinyConfig
from offbeat.errors import ModelError
from offbeat.model.load import context_length, load_causal_lm
from offbeat.model.tiny import build_tiny


@pytest.fixture
def folder(tmp_path):
    tiny = TinyConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=24, max_positions=32)
    build_tiny(tmp_path / "tiny", tiny=tiny, vocab_size=11, eos_token_id=1, pad_token_id=None, seed=0)
    return tmp_path / "tiny"


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def test_a_configuration_with_more_layers_than_the_weights_is_refused(folder):
    edit_config(folder, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(ModelError, match=r"lacks or misshapes 11 weights, 'model.layers.2"):
        load_causal_lm(str(folder))


def test_an_unknown_architecture_is_refused(folder):
    edit_config(folder, model_type="abacus")
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model: .*abacus"):
        load_causal_lm(str(folder))


def test_weights_that_are_no_safetensors_are_refused(folder):
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_causal_lm(str(folder))


def test_a_configuration_without_a_context_length_is_refused():
    assert context_length(PretrainedConfig(n_positions=64)) == 64
    with pytest.raises(ModelError, match="max_position_embeddings"):
        context_length(MambaConfig())
