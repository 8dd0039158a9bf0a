"""Log-probabilities picked chunk by chunk against a log-softmax of everything, and that everything is never held."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import linear, log_softmax
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from offbeat.data.packing import PackedRow, Segments
from offbeat.errors import ModelError
from offbeat.model import head as head_module
from offbeat.model.head import ACCELERATOR_SIZES, CPU_SIZES, FusedHead, Picks, compute_in_float32, fused_head, pick
from offbeat.model.logprobs import token_logprobs

V, H, U = 49, 16, 11
POSITIONS, TARGETS = np.array([4, 0, 4, 4, 10, 9, 10]), np.array([0, 1, 3, 3, 7, 48, 6])


def slow(logits, temperature):
    """[M] log-probabilities and [U] entropies of the plain kind."""
    table = log_softmax(logits.float() / temperature, dim=-1)
    return table[POSITIONS, TARGETS], -(table.exp() * table.masked_fill(table == -torch.inf, 0.0)).sum(-1)


@pytest.mark.usefixtures("chunks")
def test_picks_of_logits_are_those_of_a_whole_log_softmax():
    generator = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(U, V, generator=generator)
    logits[4, 7:20] = -torch.inf  # tokens that cannot come
    weights = torch.randn(7, generator=generator)
    mine, theirs = (logits.clone().requires_grad_() for _ in range(2))
    got, entropy = pick(mine, Picks(POSITIONS, TARGETS, 0.7, with_entropy=True))
    expected, expected_entropy = slow(theirs, 0.7)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=1e-5)
    assert torch.equal(mine, logits) or mine.isinf().any(), "the logits are left as they were"


@pytest.mark.usefixtures("chunks")
def test_the_gradient_of_the_entropy_is_that_of_a_whole_log_softmax():
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(U, V, generator=generator)
    logits[4, 7:20] = -torch.inf
    weights, bonus = torch.randn(7, generator=generator), torch.randn(U, generator=generator)
    mine, theirs = (logits.clone().requires_grad_() for _ in range(2))
    got, entropy = pick(mine, Picks(POSITIONS, TARGETS, 0.7, with_entropy=True, entropy_gradient=True))
    expected, expected_entropy = slow(theirs, 0.7)
    ((got * weights).sum() + (entropy * bonus).sum()).backward()
    ((expected * weights).sum() + (expected_entropy * bonus).sum()).backward()
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=1e-5)
    alone = logits.clone().requires_grad_()
    pick(alone, Picks(POSITIONS, TARGETS, 0.7, with_entropy=True, entropy_gradient=True))[1].sum().backward()
    assert alone.grad[4, 7:20].eq(0).all() and alone.grad.any(), "also where no log-probability has a gradient"


def test_the_entropy_has_a_gradient_only_if_it_is_asked_for():
    logits = torch.randn(U, V, requires_grad=True)
    assert not pick(logits, Picks(POSITIONS, TARGETS, 1.0, with_entropy=True))[1].requires_grad
    broken = torch.full((U, V), torch.nan, requires_grad=True)
    pick(broken, Picks(POSITIONS, TARGETS, 1.0, with_entropy=True, entropy_gradient=True))[1].sum().backward()
    assert broken.grad.isnan().all(), "numbers that are not finite stay visible"


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_a_fused_head_gives_what_the_layer_and_a_whole_log_softmax_give(bias, autocast, entropy_gradient):
    torch.manual_seed(0)
    head, weights = torch.nn.Linear(H, V, bias=bias), torch.randn(7)
    bonus = torch.randn(U) * entropy_gradient
    hidden = torch.randn(1, 2 * U, H, requires_grad=True)
    keep = torch.arange(0, 2 * U, 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, expected_entropy = slow(linear(hidden[0, keep], head.weight, head.bias), 1.3)
    parameters = [hidden, *head.parameters()]
    wanted = torch.autograd.grad((expected * weights).sum() + (expected_entropy * bonus).sum(), parameters)
    fused = FusedHead(head, Picks(POSITIONS, TARGETS, 1.3, True, entropy_gradient), keep)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = fused.logprobs(fused(hidden))
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if autocast else {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(fused.entropy, expected_entropy, atol=1e-6, rtol=1e-5)
    assert fused.entropy.requires_grad == entropy_gradient
    loss = (got * weights).sum() + (fused.entropy * bonus).sum()
    for mine, theirs in zip(torch.autograd.grad(loss, parameters), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_a_head_in_float32_multiplies_what_it_gets_without_rounding_under_autocast(weight_dtype):
    torch.manual_seed(0)
    head = torch.nn.Linear(H, V, bias=False, dtype=weight_dtype)
    hidden = torch.randn(1, U, H, dtype=torch.bfloat16).requires_grad_()
    exact = hidden.detach()[0].double().requires_grad_(), head.weight.detach().double().requires_grad_()
    expected, expected_entropy = slow(exact[0] @ exact[1].T, 1.3)
    found = {}
    for in_float32 in (True, False):
        fused = FusedHead(head, Picks(POSITIONS, TARGETS, 1.3, True), None, in_float32=in_float32)
        with torch.autocast("cpu", torch.bfloat16):
            found[in_float32] = fused.logprobs(fused(hidden))
        if in_float32:
            torch.testing.assert_close(fused.entropy, expected_entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[True], expected, atol=1e-5, rtol=1e-5)
    assert (found[False] - expected).abs().max() > 10 * (found[True] - expected).abs().max(), "bfloat16 rounds"
    wanted = torch.autograd.grad(expected.sum(), exact)
    for mine, theirs in zip(torch.autograd.grad(found[True].sum(), [hidden, head.weight]), wanted, strict=True):
        torch.testing.assert_close(mine.reshape(theirs.shape).double(), theirs, atol=1e-2, rtol=1e-2)  # stored as hidden and weight are


def test_a_model_that_computes_its_logits_itself_has_no_head_in_float32():
    model = Gemma2ForCausalLM(Gemma2Config(
        **SIZES, bos_token_id=1, pad_token_id=0, attn_logit_softcapping=None, final_logit_softcapping=0.05))
    compute_in_float32(model)
    with pytest.raises(ModelError, match="algorithm.float32_head must be false for Gemma2ForCausalLM with train.precision = 'bf16_mixed'"):
        token_logprobs(model, make_row(5))


def test_a_frozen_head_passes_its_gradient_on():
    torch.manual_seed(0)
    head = torch.nn.Linear(H, V, bias=False).requires_grad_(False)
    hidden = torch.randn(1, U, H, requires_grad=True)
    FusedHead(head, Picks(POSITIONS, TARGETS, 1.0, with_entropy=False), None)(hidden).sum().backward()
    mine, hidden.grad = hidden.grad, None
    slow(head(hidden[0]), 1.0)[0].sum().backward()
    torch.testing.assert_close(mine, hidden.grad)
    assert head.weight.grad is None


SIZES = {
    "vocab_size": 4096, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 16, "head_dim": 8, "attn_implementation": "packed"}


def make_row(length):
    """One sequence, all of it scored but the first."""
    tokens = np.random.default_rng(0).integers(0, 4096, length).astype(np.int32)
    segments = Segments(np.zeros(1, np.int64), np.full(1, length), np.full(1, -1))
    scored = np.arange(1, length)
    return PackedRow(
        tokens, np.arange(length, dtype=np.int32), segments, source=scored - 1, target=tokens[1:].astype(np.int64), batch_index=scored,
        owner=np.zeros(length, np.int64))


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))])
        return result


def test_no_tensor_holds_the_logits_of_all_tokens(monkeypatch):
    monkeypatch.setattr(head_module, "CPU_SIZES", replace(CPU_SIZES, chunk_rows=16, kept_bytes=0))
    model, row = LlamaForCausalLM(LlamaConfig(**SIZES)), make_row(200)
    with Largest() as largest:
        logprobs, entropy = token_logprobs(model, row, with_entropy=True, entropy_gradient=True)
        (logprobs.sum() + entropy.sum()).backward()
    assert largest.numel == 4096 * 16, "a chunk, or the head's own weights, and not 199 * 4096"


class Count(TorchDispatchMode):
    """Counts the operations that would start a kernel: those that give a tensor which is no view."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


def test_an_accelerator_normalises_large_chunks_at_once_with_few_kernels(monkeypatch):
    vocab, hidden = 151_936, 2048

    def count(num):
        x = torch.empty(num, hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
        head = torch.nn.Linear(hidden, vocab, bias=False, dtype=torch.bfloat16, device="meta")
        fused = FusedHead(head, Picks(np.arange(num), np.zeros(num, np.int64), 1.0, with_entropy=True), None)
        with Count() as counted:
            fused(x[None]).sum().backward()
        return counted.number

    assert ACCELERATOR_SIZES.rows(vocab) == 3533
    assert ACCELERATOR_SIZES.rows(32_000) == 8192
    assert count(16384) < 250
    monkeypatch.setattr(head_module, "ACCELERATOR_SIZES", CPU_SIZES)
    assert count(256) > 600, "one 64th of 40,000"


@pytest.mark.parametrize("cls", [Gemma2ForCausalLM, CohereForCausalLM])
def test_logits_that_a_model_changes_after_its_head_are_scored_as_it_gives_them(cls):
    torch.manual_seed(0)
    special = {"bos_token_id": 1, "pad_token_id": 0}
    if cls is Gemma2ForCausalLM:
        config = Gemma2Config(**SIZES, **special, attn_logit_softcapping=None, final_logit_softcapping=0.05)
    else:
        config = CohereConfig(**{name: size for name, size in SIZES.items() if name != "head_dim"}, **special, logit_scale=3.0)
    model, row = cls(config), make_row(30)
    tokens = torch.from_numpy(row.tokens.astype(np.int64))
    expected = log_softmax(model(tokens[None], use_cache=False).logits[0, :-1].float(), -1).gather(1, tokens[1:, None])[:, 0]
    for _ in range(2):  # the second knows
        torch.testing.assert_close(token_logprobs(model, row), expected, atol=1e-5, rtol=0)


def test_a_head_is_put_back_whatever_happens_and_one_with_hooks_is_left_alone():
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    picks = Picks(POSITIONS, TARGETS, 1.0, with_entropy=False)
    with pytest.raises(ZeroDivisionError), fused_head(model, picks, None):
        assert "forward" in vars(model.lm_head)
        raise ZeroDivisionError
    assert "forward" not in vars(model.lm_head)
    model.lm_head.register_forward_hook(lambda *_: None)
    with fused_head(model, picks, None) as fused:
        assert fused is None


class Passes(TorchDispatchMode):
    """Counts operations on as many numbers as there are logits, other than products, and the times that they read or write so many."""

    def __init__(self, size):
        super().__init__()
        self.size, self.operations, self.times = size, 0, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        read = {name: value for name, value in (kwargs or {}).items() if name != "out"}
        tensors = [leaf for leaf in tree_leaves((args, read, result)) if isinstance(leaf, torch.Tensor) and leaf.numel() >= self.size]
        if tensors and not func.is_view and "mm" not in func.name() and "empty" not in func.name() and "index" not in func.name():
            self.operations += 1
            self.times += sum(tensor.nbytes for tensor in tensors) / (4 * self.size)
        return result


@pytest.mark.parametrize(("with_entropy", "temperature", "kept", "dtype", "expected"), [
    (True, 0.7, True, torch.bfloat16, (7, 9.5)), (True, 1.0, True, torch.bfloat16, (7, 9.5)),
    (False, 1.0, True, torch.bfloat16, (5, 6.5)), (True, 0.7, False, torch.bfloat16, (9, 13.0)),
    (True, 0.7, True, torch.float32, (7, 11.0)), (False, 1.0, True, torch.float32, (4, 6.0))])
def test_a_fused_head_passes_over_its_logits_so_often(monkeypatch, with_entropy, temperature, kept, dtype, expected):
    rows, vocab = 64, 500
    monkeypatch.setattr(head_module, "CPU_SIZES", replace(ACCELERATOR_SIZES, kept_bytes=1 << 30 if kept else 0))
    head = torch.nn.Linear(H, vocab, bias=False, dtype=dtype)
    hidden = torch.randn(1, rows, H, dtype=dtype, requires_grad=True)
    picks = Picks(np.arange(rows), np.arange(rows), temperature, with_entropy)
    with Passes(rows * vocab) as passes:
        FusedHead(head, picks, None)(hidden).sum().backward()
    assert (passes.operations, passes.times) == expected
