"""Packed scores against one forward per sequence through transformers' own attention."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from offbeat.data.packing import pack_row
from offbeat.errors import ModelError
from offbeat.model.logprobs import UnpackedError, dummy_row, token_logprobs
from offbeat.model.norm import use_fast_norms
from row_samples import SIZES, build, make_batch, one_by_one


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
        mine = torch.from_numpy(batch.target_sequences == victim)
        row = pack_row(replace(batch, tokens=tokens, targets=tokens[batch.positions + 1]), share_prefix=share)
        after = token_logprobs(model, row)
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
    class Deaf(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.config = inner, inner.config

        def forward(self, input_ids, position_ids, use_cache, attention_plan):
            return self.inner(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    with pytest.raises(UnpackedError, match="0 of 2 layers"):
        token_logprobs(Deaf(build("qwen3")), pack_row(make_batch(), share_prefix=False))


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("window", [4, 11, 28, 29])
def test_a_sliding_window_counts_positions_across_a_shared_prompt(window, share):
    batch = make_batch()
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window, attn_implementation="packed"))
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    got = token_logprobs(model, pack_row(batch, share_prefix=share))
    torch.testing.assert_close(got, one_by_one(reference, batch)[0], atol=1e-5, rtol=0)


def test_a_sequence_where_rotary_frequencies_change_is_refused_and_shorter_ones_do_not_depend_on_their_row():
    def longrope(original):
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0, 6.0, 8.0, 9.0],
                "original_max_position_embeddings": original}
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope, attn_implementation="packed"))

    batch = make_batch()
    row = pack_row(batch, share_prefix=True)
    with pytest.raises(ModelError, match="where a sequence passes 28 tokens, and one of 29 came; keep prompt and answer within 28"):
        token_logprobs(longrope(28), row)
    model = longrope(30)  # plain transformers also runs the last token, whose place a row need not hold
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    torch.testing.assert_close(token_logprobs(model, row), one_by_one(reference, batch)[0], atol=1e-5, rtol=0)


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
