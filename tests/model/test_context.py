"""Rows spread over two ranks against the same rows on one: scores, gradients and memory."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from offbeat.data.batch import Batch
from offbeat.data.packing import pack_row
from offbeat.errors import ModelError
from offbeat.model.context import ContextGroup, share_of, spread
from offbeat.model.logprobs import dummy_row, token_logprobs
from offbeat.model.lora import AdapterBank
from offbeat.model.rows import spread_rows
from offbeat.model.top import top_logprobs
from offbeat.model.values import put_value_head, token_values
from ranks import run_ranks
from row_samples import SIZES, build, make_batch

PACKED = {"attn_implementation": "packed"}


def _shaken(model):
    """Large weights, so that a leak or a wrong position shows."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.eval()


def _gpt_oss():
    model = _shaken(GptOssForCausalLM(GptOssConfig(
        **SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"], **PACKED)))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def _batch_of(lengths):
    """Sequences whose every token but the first is a target."""
    tokens = np.random.default_rng(3).integers(0, 49, sum(lengths)).astype(np.int32)
    trained = np.concatenate([np.arange(length) > 0 for length in lengths])
    return Batch.of_next_tokens(tokens, trained, lengths=lengths, columns={}, losses=())


MODELS = {
    "qwen3": lambda: build("qwen3"),
    "llama": lambda: build("llama"),
    "one key head": lambda: _shaken(LlamaForCausalLM(LlamaConfig(**SIZES | {"num_key_value_heads": 1}, **PACKED))),
    "three key heads": lambda: _shaken(LlamaForCausalLM(LlamaConfig(
        **SIZES | {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}, **PACKED))),
    "windows": lambda: _shaken(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4, **PACKED))),
    "caps": lambda: _shaken(Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, sliding_window=5, attn_logit_softcapping=2.0, **PACKED))),
    "sinks and experts": _gpt_oss,
    "learned positions": lambda: _shaken(GPT2LMHeadModel(GPT2Config(
        vocab_size=49, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **PACKED))),
}
ROWS = {
    "shared prompts": lambda: pack_row(make_batch(), share_prefix=True),
    "no shared prompts": lambda: pack_row(make_batch(), share_prefix=False),
    "equal lengths": lambda: pack_row(make_batch(even=True), share_prefix=False),
    "odd": lambda: pack_row(_batch_of([8, 4, 6]), share_prefix=False),
    "one token": lambda: pack_row(_batch_of([2]), share_prefix=False),
    "nothing scored": dummy_row,
}
CASES = [("qwen3", row) for row in ROWS] + [(model, "shared prompts") for model in MODELS if model != "qwen3"]


def _scores(model, row, *, autocast=False):
    """Scores and entropies, with gradients of a loss that reads both."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        logprobs, entropy = token_logprobs(model, row, temperature=0.7, with_entropy=True, entropy_gradient=True)
    (logprobs * torch.linspace(-1, 1, len(logprobs)) + 0.3 * entropy**2).sum().backward()
    return logprobs, entropy


def _error(found, expected):
    """Largest difference, relative to the largest element of a tensor where that exceeds 1."""
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1.0)) if b.numel() else 0.0 for a, b in pairs)


def _gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def _compare(model, row, context, run=_scores):
    """The errors of what `run` gives, and of the gradients, whose sum over the ranks is expected."""
    expected, gradients = run(model, row), _gradients(model)
    spread(model, context)
    found, own = run(model, row), _gradients(model)
    for gradient in own:
        dist.all_reduce(gradient, group=context.group)
    return _error(found, expected), _error(own, gradients)


def _values(model, row):
    model.zero_grad()
    values = token_values(model, row)
    (values**2).sum().backward()
    return [values]


def _saved_bytes(model, row):
    """Bytes that the layers keep for the backward pass, parameters not included."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        token_logprobs(model, row)
    return sum(seen.values())


def _of_adapters(model, row, context):
    """The error of the gradients of two adapters whose sequences lie in one row, and of its scores."""
    bank = AdapterBank(model, rank=4)
    slots = [bank.add(rank=4, scaling=2.0, seed=seed) for seed in range(2)]
    with torch.no_grad():
        bank.weights.add_(0.1 * torch.randn(bank.weights.shape, generator=torch.Generator().manual_seed(5)))
    batch = _batch_of([9, 5, 7, 12, 3])
    of_sequence = np.array([slots[0], slots[0], slots[1], slots[1], slots[1]])
    row = pack_row(batch, share_prefix=False, families=of_sequence)

    def run():
        bank.gradients.zero_()
        share = share_of(model, row)
        with bank.using(bank.route(share.row, of_sequence, here=share.here)):
            logprobs = token_logprobs(model, row)
            (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        return logprobs.detach(), bank.gradients.clone()

    expected, gradients = run()
    spread(model, context)
    found, own = run()
    dist.all_reduce(own, group=context.group)
    return _error([found], [expected]), _error([own], [gradients])


def _play(groups, _):
    """What the tests look at, by name."""
    context = ContextGroup(groups.mesh.get_group("dp"))
    seen = {f"{model}, {row}": _compare(MODELS[model](), ROWS[row](), context) for model, row in CASES}
    row = ROWS["shared prompts"]()

    model = build("qwen3")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    seen["checkpointing"] = _compare(model, row, context)

    model = build("qwen3")
    put_value_head(model)
    torch.nn.init.normal_(model.get_output_embeddings().weight)
    seen["values"] = _compare(model, row, context, _values)

    model = build("qwen3")
    expected = top_logprobs(model, row, top_k=3)
    spread(model, context)
    found = top_logprobs(model, row, top_k=3)
    assert torch.equal(found.top_tokens, expected.top_tokens)
    seen["top"] = _error([found.logprobs, found.top_logprobs], [expected.logprobs, expected.top_logprobs])

    seen["adapters"] = _of_adapters(build("llama"), row, context)

    model = build("qwen3")
    before = [tensor.detach() for tensor in _scores(model, row, autocast=True)]
    spread(model, context)
    seen["autocast"] = _error(_scores(model, row, autocast=True), before)

    model, long = build("qwen3"), pack_row(_batch_of([60, 60]), share_prefix=False)
    whole = _saved_bytes(model, long)
    spread(model, context)
    seen["memory"] = _saved_bytes(model, long) / whole

    refusals = {}
    apart, narrow = build("qwen3", attention="sdpa"), _shaken(LlamaForCausalLM(LlamaConfig(
        **SIZES | {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}, **PACKED)))
    for name, model in (("apart", apart), ("heads", narrow)):
        try:
            spread_rows(model, context)
        except ModelError as exc:
            refusals[name] = str(exc)
    spread_rows(model := build("qwen3"), context)
    assert share_of(model, row).context is context
    return seen | {"refusals": refusals}


@pytest.fixture(scope="module")
def pair():
    return run_ranks(_play, world=2)


@pytest.mark.parametrize("case", [*(f"{model}, {row}" for model, row in CASES), "checkpointing", "values", "adapters"])
def test_a_spread_row_has_the_scores_and_gradients_of_one_rank(pair, case):
    for rank in pair:
        scores, gradients = rank[case]
        assert scores <= 1e-5
        assert gradients <= 1e-5


def test_a_spread_row_has_the_likeliest_tokens_of_one_rank(pair):
    assert max(rank["top"] for rank in pair) <= 1e-5


def test_a_spread_row_scores_alike_under_autocast_up_to_its_rounding(pair):
    assert max(rank["autocast"] for rank in pair) <= 0.05


def test_a_rank_keeps_its_share_of_a_row_for_the_backward_pass(pair):
    # Half, and attention's output, which is kept before and after it is exchanged.
    assert max(rank["memory"] for rank in pair) <= 0.54


def test_what_cannot_be_spread_is_refused_on_every_rank(pair):
    for rank in pair:
        assert "Qwen3ForCausalLM runs each sequence by itself" in rank["refusals"]["apart"]
        assert rank["refusals"]["heads"].startswith("3 heads of attention cannot be divided among the 2 ranks")
