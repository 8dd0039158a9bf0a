"""Adapters beside a frozen model: against plain autograd with merged weights, sequence by sequence, and against PEFT."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.func import functional_call
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from offbeat.data.packing import pack_row
from offbeat.errors import ModelError
from offbeat.model.load import load_causal_lm
from offbeat.model.logprobs import dummy_row, token_logprobs
from offbeat.model.lora import AdapterBank
from offbeat.model.peft_io import Adapter, write_adapter
from row_samples import build as build_biased
from train_samples import build_model, make_batch

RANKS, SCALINGS = [4, 2, 3], [2.0, 1.0, 0.5]


def make_bank(folder, *, checkpointing=False, dtype="float32", **options):
    model = load_causal_lm(folder, dtype=dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    bank = AdapterBank(model, rank=4, **options)
    for seed, (rank, scaling) in enumerate(zip(RANKS, SCALINGS, strict=True)):
        put_random(bank, seed, rank, scaling)
    return model, bank


def put_random(bank, seed, rank, scaling):
    """An adapter whose B is not zero."""
    slot = bank.add(rank=rank, scaling=scaling, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    fresh = bank.adapter(slot)
    bank.remove_slot(slot)
    return bank.put(Adapter(rank, scaling, {
        name: (a, 0.3 * torch.randn(b.shape, generator=generator)) for name, (a, b) in fresh.pairs.items()}))


def slow_logprobs(folder, adapter, tokens):
    """Log-probabilities of one sequence under merged weights, and A and B as leaves."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    leaves = {name: tuple(t.clone().requires_grad_() for t in pair) for name, pair in adapter.pairs.items()}
    state = dict(model.named_parameters())
    merged = {f"{name}.weight": state[f"{name}.weight"].detach() + adapter.scaling * b @ a for name, (a, b) in leaves.items()}
    logits = functional_call(model, merged, (torch.from_numpy(tokens.astype(np.int64))[None],), {"use_cache": False}).logits[0, :-1]
    return log_softmax(logits, -1).gather(1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0], leaves


def weights_of(batch):
    """[M] loss weights times advantages."""
    return batch.columns["loss_weights"] * batch.columns["advantages"]


def forward_backward(model, bank, batch, slots, *, share_prefix=True, families=True, drops=False):
    """[M] log-probabilities, and gradients by slot of the sum of loss_weights * advantages * logprobs."""
    row = pack_row(batch, share_prefix=share_prefix, families=slots if families else None)
    bank.gradients.zero_()
    with bank.using(bank.route(row, slots), drops=drops):
        logprobs = token_logprobs(model, row)
        (logprobs * torch.from_numpy(weights_of(batch)[row.batch_index])).sum().backward()
    scores = np.zeros(batch.num_targets, np.float32)
    scores[row.batch_index] = logprobs.detach()
    return scores, bank.gradients.clone()


LAYOUTS = {
    "one adapter": [1, 1, 1, 1, 1, 1],
    "an adapter for each group": [2, 2, 0, 0, 1, 1],
    "one group for two": [0, 0, 2, 2, 2, 2],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_sequence_is_scored_and_differentiated_under_its_own_adapter(layout, checkpointing, folder):
    batch, slots = make_batch(3, 2), np.array(LAYOUTS[layout])
    model, bank = make_bank(folder, checkpointing=checkpointing)
    scores, gradients = forward_backward(model, bank, batch, slots)
    expected = {}
    for i in range(len(batch)):
        one = batch.select([i])
        logprobs, leaves = slow_logprobs(folder, bank.adapter(slots[i]), one.tokens)
        logprobs = logprobs[one.positions]
        np.testing.assert_allclose(
            scores[batch.target_offsets[i] : batch.target_offsets[i + 1]], logprobs.detach().numpy(), atol=1e-5)
        (logprobs * torch.from_numpy(weights_of(one))).sum().backward()
        for name, (a, b) in leaves.items():
            sums = expected.setdefault(slots[i], {}).setdefault(name, [torch.zeros_like(a), torch.zeros_like(b)])
            sums[0] += a.grad
            sums[1] += b.grad
    for slot in range(3):
        if slot not in expected:
            assert not gradients[slot].any()
            continue
        for name, (a, b) in bank.unpack(gradients[slot], slot).pairs.items():
            torch.testing.assert_close(a, expected[slot][name][0], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(b, expected[slot][name][1], rtol=1e-4, atol=1e-6)
        # What lies in the padding of a lower rank stays zero.
        assert torch.equal(bank.pack(bank.unpack(gradients[slot], slot)), gradients[slot])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_layers_with_a_bias_are_differentiated_as_their_merged_weights_are():
    model, row = build_biased("llama"), pack_row(make_batch(1, 1), share_prefix=False)
    bank = AdapterBank(model, rank=4)
    slot = put_random(bank, 0, 4, 2.0)
    with bank.using(bank.route_all(slot)):
        token_logprobs(model, row).sum().backward()
    leaves = {name: tuple(t.clone().requires_grad_() for t in pair) for name, pair in bank.adapter(slot).pairs.items()}
    state = dict(model.named_parameters())
    merged = {f"{name}.weight": state[f"{name}.weight"] + 2.0 * b @ a for name, (a, b) in leaves.items()}
    logits = functional_call(model, merged, (torch.from_numpy(row.tokens.astype(np.int64))[None],), {"use_cache": False}).logits[0]
    log_softmax(logits[row.source], -1).gather(1, torch.from_numpy(row.target)[:, None]).sum().backward()
    for name, (a, b) in bank.unpack(bank.gradients[slot], slot).pairs.items():
        torch.testing.assert_close(a, leaves[name][0].grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(b, leaves[name][1].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("families", [True, False])
@pytest.mark.parametrize("share_prefix", [True, False])
def test_the_order_of_a_row_and_shared_prompts_change_nothing(families, share_prefix, folder):
    batch, slots = make_batch(3, 2), np.array([2, 2, 0, 0, 1, 1])
    model, bank = make_bank(folder)
    expected = forward_backward(model, bank, batch, slots)
    got = forward_backward(model, bank, batch, slots, families=families, share_prefix=share_prefix)
    np.testing.assert_allclose(got[0], expected[0], atol=1e-5)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=1e-6)


def test_equal_lengths_take_one_batched_product_to_the_same_end(folder):
    batch = make_batch(3, 1).select([0, 0, 0])
    model, bank = make_bank(folder)
    scores, gradients = forward_backward(model, bank, batch, np.array([0, 1, 2]))
    for slot in range(3):
        alone = forward_backward(model, bank, batch.select([slot]), np.array([slot]))
        np.testing.assert_allclose(scores.reshape(3, -1)[slot], alone[0], atol=1e-5)
        torch.testing.assert_close(gradients[slot], alone[1][slot], rtol=1e-4, atol=1e-6)


def test_peft_computes_the_same_logits(folder, tmp_path):
    model, bank = make_bank(folder, targets=("q_proj", "down_proj"))
    tokens = torch.arange(2, 12)[None]
    for slot in range(3):
        write_adapter(bank.adapter(slot), tmp_path / str(slot), base_model=folder)
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / str(slot))
        with torch.no_grad(), bank.using(bank.route_all(slot)):
            torch.testing.assert_close(model(tokens, use_cache=False).logits, theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_without_a_route_the_model_is_the_bare_one_and_its_names_are_its_own(folder):
    bare = load_causal_lm(folder)
    model, bank = make_bank(folder)
    tokens = torch.arange(2, 12)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens, use_cache=False).logits, bare(tokens, use_cache=False).logits)
    assert model.state_dict().keys() == bare.state_dict().keys()
    assert [name for name, _ in bank.named_parameters()] == ["weights"]


def test_a_fresh_adapter_changes_nothing_and_is_equal_for_equal_seeds(folder):
    model = load_causal_lm(folder)
    bank = AdapterBank(model, rank=4)
    slots = [bank.add(rank=3, scaling=1.0, seed=seed) for seed in (5, 5, 6)]
    first, second, third = (bank.adapter(slot) for slot in slots)
    assert first.fingerprint() == second.fingerprint() != third.fingerprint()
    a, b = first.pairs["model.layers.0.mlp.down_proj"]
    assert a.shape == (3, 48) and b.shape == (32, 3) and not b.any()
    assert 0.9 / 48**0.5 < a.abs().max() <= 1 / 48**0.5
    tokens = torch.arange(2, 12)[None]
    with torch.no_grad():
        bare = model(tokens, use_cache=False).logits
        with bank.using(bank.route_all(0)):
            assert torch.equal(model(tokens, use_cache=False).logits, bare)


def test_slots_grow_are_freed_and_keep_what_they_hold(folder):
    model, bank = make_bank(folder)
    forward_backward(model, bank, make_batch(3, 2), np.array([0, 0, 1, 1, 2, 2]))
    weights, gradients = bank.weights.detach().clone(), bank.gradients.clone()
    added = [bank.add(rank=1, scaling=1.0, seed=9) for _ in range(5)]
    assert added == [3, 4, 5, 6, 7]
    assert torch.equal(bank.weights[:3], weights[:3]) and torch.equal(bank.gradients[:3], gradients[:3])
    bank.remove_slot(1)
    assert not bank.weights[1].any() and not bank.gradients[1].any()
    assert put_random(bank, 1, RANKS[1], SCALINGS[1]) == 1
    assert torch.equal(bank.weights[1], weights[1])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_acts_only_in_passes_that_want_it_and_differs_from_pass_to_pass(checkpointing, folder):
    batch, slots = make_batch(3, 2), np.array([0, 0, 1, 1, 2, 2])
    dry = forward_backward(*make_bank(folder), batch, slots)
    model, bank = make_bank(folder, dropout=0.5, checkpointing=checkpointing)
    np.testing.assert_allclose(forward_backward(model, bank, batch, slots)[0], dry[0], atol=1e-6)
    first, second = (forward_backward(model, bank, batch, slots, drops=True) for _ in range(2))
    assert np.abs(first[0] - dry[0]).max() > 1e-3 < np.abs(first[0] - second[0]).max()
    again, other = (
        forward_backward(*make_bank(folder, dropout=0.5, **more), batch, slots, drops=True) for more in ({}, {"seed": (1,)}))
    np.testing.assert_allclose(again[0], first[0], atol=1e-6)
    torch.testing.assert_close(again[1], first[1])
    assert np.abs(other[0] - first[0]).max() > 1e-3


@pytest.mark.parametrize("dtype, context", [("bfloat16", nullcontext), ("float32", lambda: torch.autocast("cpu", torch.bfloat16))])
def test_bfloat16_comes_near_float32(dtype, context, folder):
    batch, slots = make_batch(3, 2), np.array([2, 2, 0, 0, 1, 1])
    expected = forward_backward(*make_bank(folder), batch, slots)
    with context():
        scores, gradients = forward_backward(*make_bank(folder, dtype=dtype), batch, slots)
    np.testing.assert_allclose(scores, expected[0], atol=0.1)
    assert torch.nn.functional.cosine_similarity(gradients[:3], expected[1][:3]).min() > 0.99


def test_a_row_that_scores_nothing_has_a_gradient_of_zero(folder):
    model, bank = make_bank(folder)
    with bank.using(bank.route_all(0)):
        token_logprobs(model, dummy_row()).sum().backward()
    assert not bank.gradients.any()


def test_an_adapter_of_fewer_layers_learns_in_them_alone(folder):
    batch, slots = make_batch(3, 2), np.array([1, 1, 3, 3, 0, 0])
    model, bank = make_bank(folder)
    _, narrow = make_bank(folder, targets=("q_proj",))
    few = narrow.adapter(1)
    assert bank.put(few) == 3
    assert bank.adapter(3).pairs.keys() == few.pairs.keys()
    _, gradients = forward_backward(model, bank, batch, slots)
    own = bank.unpack(gradients[3], 3)
    assert own.pairs.keys() == few.pairs.keys() and all(t.any() for pair in own.pairs.values() for t in pair)
    assert torch.equal(bank.pack(own), gradients[3])  # zero elsewhere


def test_adapters_that_do_not_fit_are_refused(folder):
    _, bank = make_bank(folder)
    _, narrow = make_bank(folder, targets=("q_proj",))
    fresh = bank.adapter(0)
    reshaped = Adapter(4, 1.0, {name: (torch.zeros(4, 7), b) for name, (_, b) in fresh.pairs.items()})
    for rank in (-1, 0, 5):
        with pytest.raises(ModelError, match=rf"rank must be in 1\.\.4, got {rank}"):
            bank.add(rank=rank, scaling=1.0, seed=0)
    with pytest.raises(ModelError, match="would train no layer; model.lora.targets names layers of attn$"):
        narrow.add(rank=1, scaling=1.0, seed=0, kinds=("mlp",))
    with pytest.raises(ModelError, match="would train no layer; .* attn, mlp$"):
        bank.put(Adapter(4, 1.0, {}))
    with pytest.raises(ModelError, match="adapts also 'model.layers.0.mlp.down_proj'"):
        narrow.put(fresh)
    with pytest.raises(ModelError, match="takes .* from 7 to .* features"):
        bank.put(reshaped)
