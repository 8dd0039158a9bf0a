"""Packed scores against one forward per sequence through transformers' own attention."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import log_softmax
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from offbeat.data.batch import TokenBatch
from offbeat.data.packing import pack_row
from offbeat.errors import ModelError
from offbeat.model.logprobs import dummy_row, token_logprobs
from offbeat.model.norm import use_fast_norms

SIZES = {
    "vocab_size": 49, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128,
}


def build(name, attention="packed"):
    torch.manual_seed(0)
    if name == "qwen3":
        config = Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True, attn_implementation=attention)
        model = Qwen3ForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=False, attn_implementation=attention))
    with torch.no_grad():  # large weights, so that a leak or a wrong position shows
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def make_batch(seed=0, *, even=False):
    """Groups of samples with shared prompts, one of them promised wrongly; a lone sequence; an answer of one token; an unscored tail."""
    rng = np.random.default_rng(seed)
    sequences, prefix_lens, group_ids = [], [], []
    for group, (prompt_len, answers) in enumerate([(9, [9, 9, 9]), (5, [1, 4, 12]), (9, [9, 9]), (0, [30]), (3, [2, 2])]):
        prompt = rng.integers(0, 49, 9 if even else prompt_len)
        for answer in answers:
            sequences.append(np.concatenate([prompt, rng.integers(0, 49, 9 if even else answer)]))
            prefix_lens.append(len(prompt))
            group_ids.append(group)
    if not even:
        sequences[-1][0] = (sequences[-1][0] + 1) % 49
    masks = [np.arange(len(s)) >= max(1, p) for s, p in zip(sequences, prefix_lens, strict=True)]
    if not even:
        masks[5][-2:] = False
    offsets = np.concatenate([[0], np.cumsum([len(s) for s in sequences])])
    zeros = np.zeros(offsets[-1], np.float32)
    return TokenBatch(np.concatenate(sequences), np.concatenate(masks), zeros, zeros, zeros, offsets, group_ids, prefix_lens)


def one_by_one(model, batch, temperature=1.0):
    """[M] log-probabilities and entropies, each sequence in its own forward with sdpa."""
    logprobs, entropies = [], []
    for start, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        tokens = torch.from_numpy(batch.tokens[start:stop].astype(np.int64))
        table = log_softmax(model(input_ids=tokens[None], use_cache=False).logits[0] / temperature, dim=-1)
        scored = torch.from_numpy(np.flatnonzero(batch.loss_mask[start:stop]))
        logprobs.append(table[scored - 1, tokens[scored]])
        entropies.append(-(table[scored - 1].exp() * table[scored - 1]).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_packed_scores_and_gradients_equal_those_of_one_forward_per_sequence(name, share, even):
    model, reference = build(name), build(name, attention="sdpa")
    assert use_fast_norms(model) == (9 if name == "qwen3" else 5)
    batch = make_batch(even=even)
    row = pack_row(batch, share_prefix=share)
    weights = torch.linspace(-1, 1, len(row.target))

    expected, expected_entropy = one_by_one(reference, batch, temperature=0.7)
    (expected * weights).sum().backward()
    got, entropy = token_logprobs(model, row, temperature=0.7, with_entropy=True)
    (got * weights).sum().backward()

    assert got.dtype == torch.float32
    assert not entropy.requires_grad
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    for parameter, gradient in gradients(reference).items():
        torch.testing.assert_close(gradients(model)[parameter], gradient, atol=2e-4, rtol=1e-4, msg=lambda m, p=parameter: f"{p}: {m}")


@pytest.mark.parametrize("share", [False, True])
def test_changing_one_sequence_leaves_the_scores_of_the_others(share):
    model, batch = build("qwen3"), make_batch()
    before = token_logprobs(model, pack_row(batch, share_prefix=share))
    for victim in range(len(batch)):
        tokens = batch.tokens.copy()
        answer = slice(batch.offsets[victim] + batch.prefix_lens[victim], batch.offsets[victim + 1])
        tokens[answer] = (tokens[answer] + 1) % 49
        changed = copy.copy(batch)
        object.__setattr__(changed, "tokens", tokens)
        row = pack_row(changed, share_prefix=share)
        after = token_logprobs(model, row)
        mine = (row.batch_index >= answer.start) & (row.batch_index < answer.stop)
        torch.testing.assert_close(after[~mine], before[~mine], atol=2e-6, rtol=0)
        assert (after[mine] - before[mine]).abs().max() > 1e-2


def test_a_row_scores_alike_under_gradient_checkpointing_and_in_train_mode():
    model, row = build("qwen3"), pack_row(make_batch(), share_prefix=True)
    expected = token_logprobs(model, row)
    model.train()
    model.activation_checkpointing_enable()
    got = token_logprobs(model, row)
    got.sum().backward()
    torch.testing.assert_close(got, expected)


def test_a_dummy_row_reaches_every_parameter_with_a_gradient_of_zero():
    model = build("qwen3")
    logprobs, entropy = token_logprobs(model, dummy_row(), with_entropy=True)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert all(gradient is not None and not gradient.any() for gradient in gradients(model).values())


def test_a_model_that_ignores_the_plan_is_caught():
    with pytest.raises(ModelError, match="0 of 2 layers"):
        token_logprobs(build("qwen3", attention="sdpa"), pack_row(make_batch(), share_prefix=False))


def test_a_sliding_window_is_refused_only_for_sequences_that_it_would_cut():
    batch = make_batch()
    row = pack_row(batch, share_prefix=True)
    models = {}
    for window in (28, 29):
        torch.manual_seed(0)
        models[window] = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window, attn_implementation="packed"))
    with pytest.raises(ModelError, match="window of 28 tokens, but a sequence of 29"):
        token_logprobs(models[28], row)
    reference = copy.deepcopy(models[29])
    reference.set_attn_implementation("sdpa")
    torch.testing.assert_close(token_logprobs(models[29], row), one_by_one(reference, batch)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 3])
def test_without_a_plan_a_batch_is_plain_causal_attention_padding_and_generation_included(window):
    config = MistralConfig(**SIZES, sliding_window=window, attn_implementation="packed", eos_token_id=None)
    torch.manual_seed(0)
    model = MistralForCausalLM(config)
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("sdpa")
    ids = torch.randint(0, 49, (2, 7))
    mask = torch.ones_like(ids)
    torch.testing.assert_close(model(ids).logits, reference(ids).logits)
    mask[1, :3] = 0
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[1, 3:], reference(ids, attention_mask=mask).logits[1, 3:])
    assert model.generate(ids, attention_mask=mask, max_new_tokens=5).equal(reference.generate(ids, attention_mask=mask, max_new_tokens=5))


def test_a_model_whose_forward_cannot_select_positions_gives_the_same_scores():
    class Plain(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.config = inner, inner.config

        def forward(self, input_ids, position_ids, use_cache, attention_plan):
            return self.inner(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, attention_plan=attention_plan)

    model, row = build("llama"), pack_row(make_batch(), share_prefix=True)
    torch.testing.assert_close(token_logprobs(Plain(model), row), token_logprobs(model, row))


def test_learned_positions_follow_each_sequence():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=49, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_implementation="packed")).eval()
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("sdpa")
    batch = make_batch()
    got = token_logprobs(model, pack_row(batch, share_prefix=True))
    torch.testing.assert_close(got, one_by_one(reference, batch)[0], atol=1e-5, rtol=0)


@pytest.fixture
def lone_rank():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("lone_rank")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_wrapped_models_score_alike_and_a_dummy_row_runs_their_collectives(wrapper):
    model, row = build("qwen3"), pack_row(make_batch(), share_prefix=True)
    use_fast_norms(model)
    expected = token_logprobs(model, row)
    expected.sum().backward()
    gradient = model.model.norm.weight.grad.clone()
    model.zero_grad()
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    for _ in range(2):
        token_logprobs(wrapped, dummy_row()).sum().backward()
    got = token_logprobs(wrapped, row)
    got.sum().backward()
    torch.testing.assert_close(got, expected)
    found = model.model.norm.weight.grad
    torch.testing.assert_close(found.full_tensor() if wrapper == "fsdp2" else found, gradient)


def test_bfloat16_autocast_scores_close_to_float32():
    model, row = build("qwen3"), pack_row(make_batch(), share_prefix=True)
    use_fast_norms(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = token_logprobs(model, row)
    got.sum().backward()
    assert got.dtype == torch.float32
    assert (got - token_logprobs(model, row)).abs().mean() < 0.05
