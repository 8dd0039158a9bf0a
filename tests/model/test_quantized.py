"""Adapters over rounded weights: gradients against plain autograd in float64 over the numbers that the rounded ones stand for."""

import importlib.util

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import log_softmax

from offbeat.config.model import ROUNDED_BYTES
from offbeat.data.packing import pack_row
from offbeat.errors import MissingExtraError
from offbeat.model import quantized
from offbeat.model.logprobs import token_logprobs
from offbeat.model.lora import AdapterBank
from offbeat.model.lora_targets import find_targets
from offbeat.model.peft_io import Adapter
from offbeat.model.quantized import RoundedLinear, round_layers
from row_samples import build as build_biased
from train_samples import make_batch

NF4 = pytest.param("nf4", marks=pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="the extra qlora is not installed"))


def test_whole_numbers_of_8_bits_stand_for_the_weights() -> None:
    layer = nn.Linear(3, 2)
    layer.weight.data = torch.tensor([[1.0, -0.5, 0.25], [0, 0, 0]])
    rounded = quantized.FrozenInt8(layer)
    assert rounded.ints.tolist() == [[127, -64, 32], [0, 0, 0]] and rounded.scales.flatten().tolist() == pytest.approx([1 / 127, 0])
    x = torch.randn(4, 5, 3)
    assert torch.allclose(rounded(x), x @ rounded.plain().T + layer.bias)


@pytest.mark.parametrize("form", ["int8", NF4])
def test_gradients_are_those_of_the_numbers_that_the_rounded_weights_stand_for(form: str) -> None:
    model, batch = build_biased("llama"), make_batch(2, 2)
    whole = {name: layer.weight.detach().clone() for name, layer in find_targets(model, ("all-linear",)).items()}
    round_layers(model, form)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, RoundedLinear)}
    assert layers.keys() == whole.keys() and not any(name.endswith("_proj.weight") for name, _ in model.named_parameters())
    parts = [(name, part) for layer in layers.values() for name, part in layer.named_buffers()]
    stored = sum(part.nbytes for name, part in parts if name in ("ints", "packed") or (name, form) == ("scales", "nf4"))
    assert stored == pytest.approx(ROUNDED_BYTES[form] * sum(weight.numel() for weight in whole.values()), rel=1e-3)
    for name, layer in layers.items():
        error = (layer.plain() - whole[name]).norm() / whole[name].norm()
        assert 0 < error < {"int8": 0.01, "nf4": 0.12}[form], name
    bank = AdapterBank(model, rank=4)
    random = torch.Generator().manual_seed(0)
    slot = bank.add(rank=4, scaling=2.0, seed=0)
    fresh = bank.adapter(slot)
    bank.remove_slot(slot)
    adapter = Adapter(4, 2.0, {name: (a, 0.3 * torch.randn(b.shape, generator=random)) for name, (a, b) in fresh.pairs.items()})
    slots = np.full(len(batch), bank.put(adapter))
    row = pack_row(batch, share_prefix=True)
    factors = torch.from_numpy(batch.columns["advantages"][row.batch_index])
    with bank.using(bank.route(row, slots)):
        logprobs = token_logprobs(model, row)
        (logprobs * factors).sum().backward()
    found = bank.unpack(bank.gradients[slots[0]], int(slots[0]))

    scores = np.zeros(batch.num_targets, np.float32)
    scores[row.batch_index] = logprobs.detach()
    reference = build_biased("llama", "eager").double()
    leaves = {name: tuple(side.double().requires_grad_() for side in pair) for name, pair in adapter.pairs.items()}
    for i in range(len(batch)):
        one = batch.select([i])
        merged = {f"{name}.weight": layers[name].plain().double() + adapter.scaling * b @ a for name, (a, b) in leaves.items()}
        tokens = torch.from_numpy(one.tokens.astype(np.int64))
        logits = functional_call(reference, merged, (tokens[None],), {"use_cache": False}).logits[0, :-1]
        wanted = log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0][one.positions]
        np.testing.assert_allclose(scores[batch.target_offsets[i] : batch.target_offsets[i + 1]], wanted.detach().numpy(), atol=2e-5)
        (wanted * torch.from_numpy(one.columns["advantages"])).sum().backward()
    for name, (a, b) in leaves.items():
        for mine, theirs in zip(found.pairs[name], (a.grad, b.grad), strict=True):
            assert torch.allclose(mine.double(), theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max())), name


def test_4_bits_without_their_package_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "QLORA", ("no_such_package",))
    with pytest.raises(MissingExtraError, match=r"^model.quantization = 'nf4' needs no_such_package, which is not installed; run"):
        round_layers(nn.Module(), "nf4")
