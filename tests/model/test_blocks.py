"""Layers that are computed again, and compiled ones, give what plain ones do."""

from importlib import import_module

import pytest
import torch

from offbeat.data.packing import pack_row
from offbeat.model.blocks import checkpoint_activations, compile_layers, decoder_layers, round_rotations
from offbeat.model.load import load_causal_lm
from offbeat.model.logprobs import token_logprobs
from train_samples import build_model, make_batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("blocks"))


def found(model, row):
    """Log-probabilities and gradients of a row, and the bytes that were kept for the backward pass."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs = token_logprobs(model, row)
    logprobs.sum().backward()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return [logprobs.detach(), *(parameter.grad for parameter in model.parameters())], sum(
        size for pointer, size in kept.items() if pointer not in weights)


def test_what_is_computed_again_is_the_same_and_less_is_kept(folder):
    row = pack_row(make_batch(4, 4), share_prefix=True)
    results = {}
    for recompute in ("off", "selective", "full"):
        model = load_causal_lm(folder)
        checkpoint_activations(model, recompute)
        results[recompute] = found(model, row)
    for recompute in ("selective", "full"):
        for mine, plain in zip(results[recompute][0], results["off"][0], strict=True):
            assert torch.equal(mine, plain)
    assert results["full"][1] < results["off"][1] / 2


def test_compiled_layers_serve_rows_of_any_length_and_every_plan(folder):
    counters = import_module("torch._dynamo.utils").counters  # takes seconds
    plain, compiled = load_causal_lm(folder), load_causal_lm(folder)
    compile_layers(compiled, backend="eager")
    counters.clear()
    for groups, share_prefix in ((1, True), (3, False)):
        row = pack_row(make_batch(groups, 3, seed=groups), share_prefix=share_prefix)
        for mine, theirs in zip(found(compiled, row)[0], found(plain, row)[0], strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    num_graphs = counters["stats"]["unique_graphs"]
    found(compiled, pack_row(make_batch(2, 4), share_prefix=True))
    assert counters["stats"]["unique_graphs"] == num_graphs > 1, "parts before and after attention, and no new ones for another row"


def test_compiled_layers_rotate_to_the_format_of_autocast_and_otherwise_as_before(folder):
    model = load_causal_lm(folder)
    layers = decoder_layers(model)
    file = import_module(type(layers[0].self_attn).__module__)
    states = torch.randn(1, 2, 5, 8)
    angles = torch.rand(2, 1, 5, 8)
    expected = file.apply_rotary_pos_emb(states, states, *angles)
    round_rotations(layers)
    rotate = file.apply_rotary_pos_emb
    round_rotations(layers)
    assert file.apply_rotary_pos_emb is rotate, "once is enough"
    for mine, theirs in zip(rotate(states, states, *angles), expected, strict=True):
        assert torch.equal(mine, theirs)
    with torch.autocast("cpu", torch.bfloat16):
        assert [torch.equal(mine, theirs.bfloat16()) for mine, theirs in zip(
            rotate(states, states, *angles), expected, strict=True)] == [True, True]
