"""Log-probabilities within supports against a loop in float64 over single tokens, and their gradients against it and finite differences."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import linear
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

from drawn_supports import as_supports, supports_at_random
from offbeat.data.packing import pack_row
from offbeat.data.sample_supports import BITS, KEPT, LEFT_OUT
from offbeat.model.head import FusedHead, Picks, pick
from offbeat.model.logprobs import token_logprobs
from offbeat.model.supports import keep_within
from row_samples import SIZES, build, make_batch

V, H, U = 49, 16, 11
POSITIONS, TARGETS = np.arange(U), np.random.default_rng(5).integers(0, V, U)
SUPPORTS, MASKS = supports_at_random(TARGETS, V)


def slow(logits, temperature, masks=MASKS, targets=TARGETS):
    """[U] log-probabilities and entropies in float64, a position at a time, of the logits inside alone."""
    logprobs, entropies = [], []
    for position, (mask, target) in enumerate(zip(masks, targets, strict=True)):
        inside = np.flatnonzero(mask)
        table = torch.log_softmax(logits[position, torch.from_numpy(inside)].double() / temperature, dim=-1)
        logprobs.append(table[int(np.searchsorted(inside, target))])
        entropies.append(-(table.exp() * table).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def test_logits_outside_are_set_in_all_forms_and_parts_of_a_vocabulary():
    logits = torch.randn(U, V)
    assert set(SUPPORTS.forms.tolist()) == {LEFT_OUT, KEPT, BITS}
    for start, stop in ((0, V), (0, 20), (20, 40), (40, V)):
        found = keep_within(logits[:, start:stop].clone(), SUPPORTS, start=start)
        mask = torch.from_numpy(MASKS[:, start:stop])
        assert torch.equal(found[mask], logits[:, start:stop][mask]) and found[~mask].eq(-1e20).all()


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_log_probabilities_and_entropies_are_those_of_the_tokens_inside(fused, entropy_gradient, temperature):
    torch.manual_seed(0)
    weight, bias, hidden = torch.randn(V, H, requires_grad=True), torch.randn(V, requires_grad=True), torch.randn(U, H, requires_grad=True)
    given, bonus = [hidden, weight, bias], torch.randn(U) * entropy_gradient
    picks = Picks(POSITIONS, TARGETS, temperature, with_entropy=True, entropy_gradient=entropy_gradient, supports=SUPPORTS)
    if fused:
        head = torch.nn.Linear(H, V)
        head.weight, head.bias = torch.nn.Parameter(weight.detach()), torch.nn.Parameter(bias.detach())
        mine = FusedHead(head, picks, None)
        got, entropy = mine.logprobs(mine(hidden[None])), mine.entropy
        parameters = [hidden, head.weight, head.bias]
    else:
        logits = linear(hidden, weight, bias)
        before = logits.detach().clone()
        got, entropy = pick(logits, picks)
        assert torch.equal(logits, before), "the logits are left as they were"
        parameters = given
    expected, expected_entropy = slow(linear(*(part.double() for part in given)), temperature)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=1e-5)
    weights = torch.randn(U)
    wanted = torch.autograd.grad((expected * weights).sum() + (expected_entropy * bonus).sum(), given)
    loss = (got * weights).sum() + ((entropy * bonus).sum() if entropy_gradient else 0.0)
    for found, theirs in zip(torch.autograd.grad(loss, parameters), wanted, strict=True):
        torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-5)
    plain = pick(linear(hidden, weight, bias), replace(picks, supports=None))[0]
    assert (plain - got).abs().max() > 0.1


@pytest.mark.usefixtures("chunks")
def test_a_head_in_bfloat16_has_the_same_supports():
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(H, V, bias=False), torch.randn(1, U, H)
    fused = FusedHead(head, Picks(POSITIONS, TARGETS, 0.7, with_entropy=True, supports=SUPPORTS), None)
    with torch.autocast("cpu", torch.bfloat16):
        got, logits = fused.logprobs(fused(hidden)), head(hidden[0])
    expected, entropy = slow(logits, 0.7)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fused.entropy.double(), entropy, atol=1e-5, rtol=1e-5)
    got.sum().backward()
    assert head.weight.grad is not None and head.weight.grad.isfinite().all()


def supported(batch):
    """The batch with a support for each of its targets, in all forms, and the masks."""
    supports, masks = supports_at_random(batch.targets, V)
    return replace(batch, supports=supports), masks


def one_by_one(model, batch, masks, temperature):
    """[M] log-probabilities and entropies of each sequence alone."""
    found = []
    for number in range(len(batch)):
        one, own = batch.select([number]), batch.target_sequences == number
        logits = model(input_ids=torch.from_numpy(one.tokens.astype(np.int64))[None], use_cache=False).logits[0]
        if own.any():
            found.append(slow(logits[torch.from_numpy(one.positions)], temperature, masks[own], one.targets))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_each_sample_of_a_shared_prompt_has_its_own_support(name, share):
    model, reference = build(name), build(name, attention="sdpa").double()
    batch, masks = supported(make_batch())
    weights = torch.linspace(-1, 1, batch.num_targets)
    expected, expected_entropy = one_by_one(reference, batch, masks, 0.7)
    got, entropy = token_logprobs(model, pack_row(batch, share_prefix=share), temperature=0.7, with_entropy=True)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=0)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    wanted = dict(reference.named_parameters())
    for parameter, own in model.named_parameters():
        torch.testing.assert_close(
            own.grad, wanted[parameter].grad.float(), atol=2e-4, rtol=1e-4, msg=lambda m, p=parameter: f"{p}: {m}")


def test_the_slope_of_a_log_probability_is_its_finite_difference():
    model, (batch, _) = build("llama").double(), supported(make_batch())
    row, weights = pack_row(batch, share_prefix=True), torch.linspace(-1, 1, batch.num_targets)
    (token_logprobs(model, row, temperature=0.7) * weights).sum().backward()
    for parameter in (model.lm_head.weight, model.model.layers[0].mlp.up_proj.weight):
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        ends = []
        with torch.no_grad():
            for step in (0.01, -0.01):
                parameter += step * direction
                ends.append((token_logprobs(model, row, temperature=0.7).double() * weights).sum().item())
                parameter -= step * direction
        assert (parameter.grad * direction).sum().item() == pytest.approx((ends[0] - ends[1]) / 0.02, rel=1e-2)


def test_models_that_run_sequences_alone_or_change_their_logits_normalise_within_supports_too():
    batch, masks = supported(make_batch())
    torch.manual_seed(0)
    gemma = Gemma2Config(
        **SIZES, head_dim=8, final_logit_softcapping=3.0, attn_logit_softcapping=None, pad_token_id=0, attn_implementation="packed")
    gpt2 = GPT2Config(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1)
    for kind, config in ((Gemma2ForCausalLM, gemma), (GPT2LMHeadModel, gpt2)):
        model = kind(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.15 * torch.randn_like(parameter))
        got = token_logprobs(model, pack_row(batch, share_prefix=True), temperature=0.7)
        model.set_attn_implementation("eager")
        torch.testing.assert_close(got.double(), one_by_one(model, batch, masks, 0.7)[0], atol=2e-5, rtol=0)


def test_a_support_of_one_token_is_certain_and_moves_nothing():
    model, batch = build("qwen3"), make_batch()
    alone = as_supports(np.arange(V)[None] == batch.targets[:, None], [KEPT] * batch.num_targets)
    got, entropy = token_logprobs(model, pack_row(replace(batch, supports=alone), share_prefix=True), with_entropy=True)
    assert got.abs().max() < 1e-6 and entropy.abs().max() < 1e-6
    got.sum().backward()
    assert all(parameter.grad.abs().max() < 1e-5 for parameter in model.parameters())
