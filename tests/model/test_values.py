"""A value model gives the output of its head at the position that predicts each target, and nothing else of the model changes."""

import numpy as np
import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM

from offbeat.config.train import TrainConfig
from offbeat.data.packing import pack_row
from offbeat.errors import ModelError
from offbeat.model.values import ValueHead, check_value_head, put_value_head, token_values
from offbeat.trainer.policy import load_policy
from train_samples import build_model, make_batch


@pytest.fixture
def model(tmp_path):
    return load_policy(build_model(tmp_path), config=TrainConfig())


def test_values_begin_at_zero_and_are_those_of_each_sequence_alone(model):
    batch = make_batch(2, 3)
    put_value_head(model)
    check_value_head(model)
    row = pack_row(batch, share_prefix=True)
    assert not token_values(model, row).any()
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.normal_()
        head.bias.fill_(0.5)
    found = token_values(model, row)
    expected = np.zeros(batch.num_targets)
    for i in range(len(batch)):
        one = batch.select([i])
        hidden = model.model(input_ids=torch.from_numpy(one.tokens.astype(np.int64))[None], use_cache=False).last_hidden_state[0]
        values = hidden @ head.weight[0] + 0.5
        expected[batch.target_offsets[i]:batch.target_offsets[i + 1]] = values[one.positions].detach().numpy()
    np.testing.assert_allclose(found.detach().numpy(), expected[row.batch_index], atol=1e-4)
    found.sum().backward()
    assert head.weight.grad is not None and model.get_input_embeddings().weight.grad.any()
    assert not model.config.tie_word_embeddings and head.weight is not model.get_input_embeddings().weight


def test_a_head_computes_in_float32_under_autocast():
    head = ValueHead(8)
    with torch.no_grad():
        head.weight.fill_(1.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert head(torch.full((1, 8), 1 + 2**-10)).item() == 8 * (1 + 2**-10)


def test_a_model_that_computes_with_what_its_head_gives_is_refused(tmp_path):
    config = CohereConfig(
        vocab_size=23, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=32, logit_scale=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = CohereForCausalLM(config).eval()
    put_value_head(model)
    with pytest.raises(ModelError, match=r"CohereForCausalLM changes what its output head gives, so that it cannot give values"):
        check_value_head(model)
