"""Adapters of fused experts: against merged weights by plain autograd, against PEFT both ways, and row by row in the engine."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.func import functional_call
from torch.nn.functional import log_softmax
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from offbeat.data.packing import pack_row
from offbeat.engine.loader import load_forward
from offbeat.engine.lora import AdapterRows, AdapterStack
from offbeat.engine.options import EngineOptions
from offbeat.errors import ModelError
from offbeat.model.fused_experts import check_experts, split_name
from offbeat.model.load import load_causal_lm
from offbeat.model.logprobs import token_logprobs
from offbeat.model.lora import AdapterBank
from offbeat.model.peft_io import Adapter, read_adapter, write_adapter
from train_samples import VOCAB, make_batch

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "intermediate_size": 12, "max_position_embeddings": 64, "num_experts_per_tok": 2, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0}
OWN = {"qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 12}, "gpt_oss": {"num_local_experts": 4}}
TARGETS = ("q_proj", "experts")
TOKENS = torch.tensor([[5, 9, 3, 8, 8, 1, 7, 2]])


def build(folder, family="qwen3_moe"):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES, **OWN[family]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)
        model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build(tmp_path_factory.mktemp("experts"))


def random_adapter(bank, seed, *, rank, scaling):
    """An adapter that a bank holds, whose B is not zero."""
    slot = bank.add(rank=rank, scaling=scaling, seed=seed)
    fresh, generator = bank.adapter(slot), torch.Generator().manual_seed(seed)
    bank.remove_slot(slot)
    return Adapter(rank, scaling, {
        name: (a, 0.3 * torch.randn(b.shape, generator=generator)) for name, (a, b) in fresh.pairs.items()})


def merged_state(model, pairs, scaling):
    """Parameters with the products of pairs added, each expert to its part of a fused tensor."""
    state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, (a, b) in pairs.items():
        of_expert = split_name(name)
        key = f"{name}.weight" if of_expert is None else ".".join(of_expert[:2])
        added = scaling * b @ a
        if of_expert is not None:
            added = torch.zeros_like(state[key]).index_add(0, torch.tensor([of_expert[2]]), added[None])
        state[key] = state[key] + added
    return state


def logits_of(folder, pairs, scaling, tokens):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return functional_call(model, merged_state(model, pairs, scaling), (tokens,), {"use_cache": False}).logits


@pytest.mark.parametrize("recompute", [False, True])
def test_each_sequence_is_scored_and_differentiated_under_its_own_adapter(folder, recompute):
    model = load_causal_lm(folder).train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    bank = AdapterBank(model, rank=3, targets=TARGETS)
    adapters = [random_adapter(bank, seed, rank=rank, scaling=scaling) for seed, (rank, scaling) in enumerate([(3, 2.0), (2, 0.5)])]
    slots = [bank.put(adapter) for adapter in adapters]
    batch, of_sequence = make_batch(3, 1), np.array([0, 1, 0])
    weights = torch.from_numpy(batch.columns["loss_weights"] * batch.columns["advantages"])
    row = pack_row(batch, share_prefix=False)
    with bank.using(bank.route(row, np.array(slots)[of_sequence])):
        logprobs = token_logprobs(model, row)
        (logprobs * weights[row.batch_index]).sum().backward()
    leaves = [{name: tuple(t.clone().requires_grad_() for t in pair) for name, pair in adapter.pairs.items()} for adapter in adapters]
    parts = []
    for sequence, (low, high) in enumerate(zip(batch.offsets[:-1], batch.offsets[1:], strict=True)):
        tokens, which = torch.from_numpy(batch.tokens[low:high].astype(np.int64)), of_sequence[sequence]
        logits = logits_of(folder, leaves[which], adapters[which].scaling, tokens[None])[0, :-1]
        own = batch.target_sequences == sequence
        at = torch.from_numpy(batch.positions[own] - low)
        parts.append(log_softmax(logits, -1)[at, torch.from_numpy(batch.targets[own].astype(np.int64))])
    expected = torch.cat(parts)
    torch.testing.assert_close(logprobs.detach(), expected.detach()[row.batch_index], atol=2e-5, rtol=0)
    (expected * weights).sum().backward()
    for slot, own in zip(slots, leaves, strict=True):
        found = bank.unpack(bank.gradients[slot], slot)
        assert any(split_name(name) and b.any() for name, (_, b) in found.pairs.items())
        for name, pair in own.items():
            for mine, leaf in zip(found.pairs[name], pair, strict=True):
                theirs = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


def test_without_a_route_and_with_a_fresh_adapter_the_model_is_the_bare_one(folder):
    model = load_causal_lm(folder)
    row = pack_row(make_batch(2, 2), share_prefix=True)
    bare = token_logprobs(model, row)
    bank = AdapterBank(model, rank=2, targets=TARGETS)
    assert torch.equal(token_logprobs(model, row), bare)
    with bank.using(bank.route_all(bank.add(rank=2, scaling=1.0, seed=0))):
        torch.testing.assert_close(token_logprobs(model, row), bare, atol=1e-5, rtol=0)
    plain = AdapterBank(load_causal_lm(folder), rank=2, targets=("q_proj",))
    assert not any(map(split_name, plain.adapter(plain.add(rank=2, scaling=1.0, seed=0)).pairs))


@torch.no_grad()
@pytest.mark.parametrize("targets", [TARGETS, ("experts",)])
def test_peft_computes_the_same_with_what_we_write_and_we_read_it_back(folder, tmp_path, targets):
    adapter = random_adapter(AdapterBank(load_causal_lm(folder), rank=3, targets=targets), 1, rank=3, scaling=1.5)
    write_adapter(adapter, tmp_path / "a", base_model=folder)
    base = AutoModelForCausalLM.from_pretrained(folder)
    plain = base(TOKENS, use_cache=False).logits
    theirs = PeftModel.from_pretrained(base, tmp_path / "a").eval()(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(theirs, logits_of(folder, adapter.pairs, 1.5, TOKENS), atol=2e-5, rtol=0)
    assert (theirs - plain).abs().max() > 0.1
    assert read_adapter(tmp_path / "a").fingerprint() == adapter.fingerprint()


@torch.no_grad()
@pytest.mark.parametrize("parameters", [["experts.gate_up_proj", "experts.down_proj"], ["mlp.experts.down_proj"]])
def test_we_compute_the_same_with_what_peft_writes(folder, tmp_path, parameters):
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["v_proj"], target_parameters=parameters, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_(0, 0.3)
    model.save_pretrained(tmp_path / "a")
    adapter = read_adapter(tmp_path / "a")
    assert {of_expert[1] for of_expert in map(split_name, adapter.pairs) if of_expert} == {name.rpartition(".")[2] for name in parameters}
    theirs = model(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(theirs, logits_of(folder, adapter.pairs, adapter.scaling, TOKENS), atol=2e-5, rtol=0)


@torch.inference_mode()
def test_each_row_of_the_engine_has_its_own_experts(folder):
    forward = load_forward(EngineOptions(model=folder))
    bank = AdapterBank(load_causal_lm(folder), rank=3, targets=TARGETS)
    adapters = [random_adapter(bank, seed, rank=rank, scaling=scaling) for seed, (rank, scaling) in enumerate([(3, 2.0), (2, 0.5)])]
    stack = AdapterStack(forward.lora_groups, device=forward.device)
    stack.place(adapters)
    assert [stack.read(adapter).fingerprint() for adapter in adapters] == [adapter.fingerprint() for adapter in adapters]
    tokens = TOKENS.expand(3, -1)
    [found] = forward.score(tokens, lora=AdapterRows(stack, np.repeat([1, -1, 0], TOKENS.shape[1])))
    for row, adapter in zip(found.unflatten(0, tokens.shape), (adapters[1], None, adapters[0]), strict=True):
        expected = logits_of(folder, adapter.pairs if adapter else {}, adapter.scaling if adapter else 1.0, TOKENS)[0]
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)


def test_experts_of_another_form_and_other_parameters_are_refused(folder, tmp_path):
    model = load_causal_lm(build(tmp_path / "oss", "gpt_oss"))
    with pytest.raises(ModelError, match="GptOssForCausalLM has experts of a form that is not adapted; leave .experts. out"):
        check_experts(model)
    config = LoraConfig(r=2, target_parameters=["gate.weight"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(tmp_path / "a")
    with pytest.raises(ModelError, match="with target_parameters = .'gate.weight'., which is not offered"):
        read_adapter(tmp_path / "a")
