"""How a policy's rows run, and that a model which computes something else than its own forward says so."""

import pytest
import torch

from families import build
from family_table import FAMILIES
from offbeat.errors import ModelError
from offbeat.model.load import load_causal_lm
from offbeat.model.logprobs import packs_rows
from offbeat.model.rows import settle_rows

BY_NAME = {family.name: family for family in FAMILIES}


@pytest.fixture
def load(tmp_path):
    """name -> its tiny model with plain attention."""
    return lambda name: load_causal_lm(build(BY_NAME[name], str(tmp_path)).folder, attention=None)


def test_layers_of_attention_pack_their_rows_and_others_do_not(load):
    model = load("Gemma 2")
    settle_rows(model, share_prefix=True)
    assert packs_rows(model)
    for name, match in (("Qwen3.5", "has linear_attention layers"), ("BLOOM", "code of its own"), ("StableLM", "0 of its 2 layers")):
        model = load(name)
        with pytest.raises(ModelError, match=f"{match}.*must run by itself; set train.share_prefix to false"):
            settle_rows(model, share_prefix=True)
        settle_rows(model, share_prefix=False)
        assert not packs_rows(model)


def test_a_model_that_attends_to_later_tokens_is_refused(load):
    model = load("Gemma 3")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ModelError, match="^Gemma3Attention lets tokens attend to later ones"):
        settle_rows(model, share_prefix=True)


def test_numbers_that_differ_from_those_of_each_sequence_alone_are_refused(load):
    model = load("Llama 2")
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def leaking(*args, attention_plan=None, **kwargs):
        output, weights = forward(*args, attention_plan=attention_plan, **kwargs)
        return (output + output.mean(dim=1, keepdim=True) if attention_plan is not None else output), weights

    attention.forward = leaking
    with pytest.raises(ModelError, match=r"off by \d\S* nats on average from those of each sequence alone"):
        settle_rows(model, share_prefix=True)


def test_what_a_models_own_code_raises_becomes_one_sentence(load):
    model = load("Llama 2")

    def broken(*args, **kwargs):
        raise IndexError("too many indices")

    model.model.layers[0].forward = broken
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot run on a row of tokens: too many indices; use another model"):
        settle_rows(model, share_prefix=True)


def test_a_bfloat16_model_passes(load):
    model = load("Qwen3").to(torch.bfloat16)
    settle_rows(model, share_prefix=True)
    assert packs_rows(model)
