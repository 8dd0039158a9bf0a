"""Adapters beside layers that two ranks compute together, of families that divide them in different ways: as on one process."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from offbeat.data.packing import pack_row
from offbeat.errors import ModelError
from offbeat.model.layer_slices import note_division, slice_of
from offbeat.model.load import load_causal_lm
from offbeat.model.logprobs import token_logprobs
from offbeat.model.lora import AdapterBank
from offbeat.model.parallel import divide
from offbeat.model.peft_io import Adapter
from ranks import run_alone, run_ranks
from train_samples import TINY, VOCAB, arranged, make_batch

SIZES = {
    "vocab_size": VOCAB, "hidden_size": TINY.hidden_size, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
    "decoder_sparse_step": 1, "mlp_only_layers": []}
FAMILIES = {
    "llama": {"attention_bias": True},  # of slices, and biases, which make a layer's output a view
    "gemma2": {"sliding_window": 6},
    "phi3": {},  # of layers whose inputs and outputs are whole, whatever a rank has of their weights
    "qwen2_moe": EXPERTS,  # with a layer that is whole on every rank, beside experts
}


def build(folder):
    """A random model of each family, each in a folder of its name."""
    for family, settings in FAMILIES.items():
        with torch.random.fork_rng():
            torch.manual_seed(1)
            AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES | settings)).save_pretrained(f"{folder}/{family}")
    return str(folder)


def put_random(bank):
    """An adapter whose B is not zero."""
    fresh = bank.adapter(slot := bank.add(rank=3, scaling=2.0, seed=0))
    bank.remove_slot(slot)
    generator = torch.Generator().manual_seed(1)
    return bank.put(Adapter(3, 2.0, {
        name: (a, 0.3 * torch.randn(b.shape, generator=generator)) for name, (a, b) in fresh.pairs.items()}))


def _differentiate(groups, folder):
    """By family and way: log-probabilities of targets, and the adapter's gradient, which the ranks sum."""
    found = {}
    for family in FAMILIES:
        for way, settings in {"plain": {}, "checkpointed": {}, "dropout": {"dropout": 0.3}}.items():
            model = load_causal_lm(f"{folder}/{family}")
            if groups.world > 1:
                divide(model, arranged(groups, "tp2").mesh["tp"], experts=family == "qwen2_moe")
            if way == "checkpointed":
                model.train().gradient_checkpointing_enable({"use_reentrant": False})
            bank = AdapterBank(model, rank=4, **settings)
            route = bank.route_all(slot := put_random(bank))
            row = pack_row(make_batch(2, 3), share_prefix=True)
            with bank.using(route, drops=bool(settings)):
                logprobs = token_logprobs(model, row)
                (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
            with torch.no_grad(), bank.using(route):
                scored = token_logprobs(model, row)
            gradients = bank.gradients[slot].clone()
            if groups.world > 1:
                dist.all_reduce(gradients)
            assert all(parameter.grad is None for parameter in model.parameters())
            pairs = {f"{family} {way} {name}": [a.flatten().tolist(), b.flatten().tolist()]
                     for name, (a, b) in bank.unpack(gradients, slot).pairs.items()}
            found |= pairs | {f"{family} {way} logprobs": [logprobs.tolist(), scored.tolist()]}
    return found


def test_two_ranks_that_share_each_layer_give_an_adapter_the_gradient_of_one(tmp_path):
    folder = build(tmp_path)
    alone = run_alone(_differentiate, argument=folder)
    assert any("shared_expert_gate" in name for name in alone) and any("qkv_proj" in name for name in alone)
    for found in run_ranks(_differentiate, world=2, argument=folder):
        assert found.keys() == alone.keys()
        for name, expected in alone.items():
            for own, wanted in zip(found[name], expected, strict=True):
                assert np.abs(wanted).max() > 0, name
                np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(wanted).max()), err_msg=name)


class Mesh:
    """As much of a mesh as is looked at."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def get_group(self):
        return self

    def get_local_rank(self):
        return self._rank

    def size(self):
        return self._size


def sliced(style, *, rank, size=3):
    model = nn.ModuleDict({"up": nn.Linear(7, 4)})
    note_division(model, Mesh(rank, size), {} if style is None else {"up": style})
    return slice_of(model, "up")


@pytest.mark.parametrize(("num", "size"), [(7, 3), (4, 3), (6, 2), (2, 3)])
def test_features_are_cut_as_a_tensor_is(num, size):
    model = nn.ModuleDict({"up": nn.Linear(1, num)})
    parts = []
    for rank in range(size):
        note_division(model, Mesh(rank, size), {"up": "colwise"})
        parts.append(torch.arange(num)[slice_of(model, "up").outputs].tolist())
    assert parts == ([part.tolist() for part in torch.arange(num).chunk(size)] + [[]] * size)[:size]


def test_a_rank_has_a_slice_of_inputs_or_of_outputs_or_all():
    alone = slice_of(nn.ModuleDict({"up": nn.Linear(7, 4)}), "up")
    assert (alone.inputs, alone.outputs, alone.group, alone.counts) == (slice(None), slice(None), None, True)
    assert [(sliced("colwise", rank=rank).inputs, sliced("colwise", rank=rank).outputs) for rank in (0, 2)] == [
        (slice(None), slice(0, 2)), (slice(None), slice(4, 4))]
    assert [(sliced("rowwise", rank=rank).inputs, sliced("rowwise", rank=rank).outputs) for rank in (0, 2)] == [
        (slice(0, 3), slice(None)), (slice(6, 7), slice(None))]
    for style in (None, "colwise_gather_output", "rowwise_split_input"):
        parts = [sliced(style, rank=rank) for rank in range(3)]
        assert {(str(part.inputs), str(part.outputs)) for part in parts} == {(str(slice(None)),) * 2}
        assert [part.counts for part in parts] == [True, False, False], "the gradient is whole on every rank, and counts once"


def test_layers_that_are_divided_in_a_way_of_their_own_are_refused():
    with pytest.raises(ModelError, match=r"model.lora.targets names 'up', which transformers divides over ranks as 'mla_kv_a_proj', where"
                                         r" adapters cannot follow; leave it out of the targets, or set train.parallel.tp to 1"):
        sliced("mla_kv_a_proj", rank=0)
