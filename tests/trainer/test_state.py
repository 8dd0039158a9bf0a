"""The whole weights: tied ones once, buffers that belong to a checkpoint, in the format asked for."""

import numpy as np
import torch

from named_bytes import named_bytes
from offbeat.model.load import load_causal_lm
from offbeat.trainer.state import full_state, parameter_bytes, rounded
from train_samples import build_model


class Small(torch.nn.Module):
    """A tied pair, a buffer that is saved and one that is not."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(3, 2)
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor([7]))
        self.register_buffer("cache", torch.zeros(1), persistent=False)


def test_tied_weights_come_once_and_only_saved_buffers_come():
    model = Small()
    state = full_state(model, dtype="bfloat16", keep=True)
    assert {name: tensor.dtype for name, tensor in state.items()} == {"embed.weight": torch.bfloat16, "count": torch.int64}
    assert torch.equal(state["embed.weight"], model.embed.weight.bfloat16())
    assert [name for name, _ in parameter_bytes(model, state)] == ["embed.weight"]


def test_weights_that_are_written_at_once_are_not_copied_where_their_format_is_the_published_one():
    model = Small()
    state = full_state(model, dtype="float32", keep=True, copies=False)
    assert state["embed.weight"].data_ptr() == model.embed.weight.data_ptr()
    assert not state["embed.weight"].requires_grad
    assert full_state(model, dtype="float32", keep=True)["embed.weight"].data_ptr() != model.embed.weight.data_ptr()
    assert full_state(model, dtype="bfloat16", keep=True, copies=False)["embed.weight"].data_ptr() != model.embed.weight.data_ptr()


def test_a_rank_that_does_not_keep_them_gets_nothing():
    assert full_state(Small(), dtype="float32", keep=False) == {}


def test_bytes_are_those_that_an_engine_fingerprints(tmp_path):
    model = load_causal_lm(build_model(tmp_path))
    mine = dict(parameter_bytes(model, full_state(model, dtype="float32", keep=True)))
    theirs = dict(named_bytes(model))
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_a_model_computes_with_its_weights_as_they_are_published_and_has_its_own_back_afterwards():
    model = Small()
    exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    storage = model.embed.weight.data_ptr()
    with rounded(model, "bfloat16"):
        published = full_state(model, dtype="bfloat16", keep=True)
        assert torch.equal(model.embed.weight, published["embed.weight"].float())
        assert model.head.weight is model.embed.weight and not torch.equal(model.embed.weight, exact["embed.weight"])
    assert all(torch.equal(parameter, exact[name]) for name, parameter in model.named_parameters())
    with rounded(model, "float32"):
        assert torch.equal(model.embed.weight, exact["embed.weight"])
    assert model.embed.weight.data_ptr() == storage
