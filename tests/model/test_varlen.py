"""Calls of the kernel for sequences of many lengths, by a slow kernel of the same contract in place of the device's own."""

from types import SimpleNamespace

import pytest
import torch

from attention_rows import ROWS, make_row, slow_attention
from offbeat.model import varlen
from offbeat.model.attention import build_plan, packed_attention


def slow_forward(query, key, value, call, scale):
    """Output [U, H, D] and log-sum-exp [H, U], sequence by sequence; the last query of a causal one sees all keys."""
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], len(query), dtype=query.dtype)
    for queries, scores, values in _sequences(query, key, value, call, scale):
        lse[:, queries] = scores.logsumexp(-1)
        out[queries] = (scores.softmax(-1) @ values).transpose(0, 1)
    return out, lse


def slow_backward(grad, query, key, value, out, lse, call, scale):
    """Gradients by flash attention's formulas, whose softmax has the log-sum-exp that is given."""
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    repeat = query.shape[1] // key.shape[1]
    bounds = zip(call.query_bounds[:-1], call.query_bounds[1:], call.key_bounds[:-1], call.key_bounds[1:], strict=True)
    for (queries, scores, values), (_, _, low, high) in zip(_sequences(query, key, value, call, scale), bounds, strict=True):
        shares = (scores - lse[:, queries, None]).exp()
        delta = (grad[queries] * out[queries]).sum(-1).t().unsqueeze(-1)
        grad_out = grad[queries].transpose(0, 1)
        grad_scores = shares * (grad_out @ values.mT - delta) * scale
        keys = key[low:high].repeat_interleave(repeat, 1).transpose(0, 1)
        grads[0][queries] = (grad_scores @ keys).transpose(0, 1)
        for into, part in ((grads[1], grad_scores.mT @ query[queries].transpose(0, 1)), (grads[2], shares.mT @ grad_out)):
            into[low:high] = part.unflatten(0, (-1, repeat)).sum(1).transpose(0, 1)
    return tuple(grads)


def _sequences(query, key, value, call, scale):
    """Yield each sequence's queries, its scores [H, Lq, Lk] and its values [H, Lk, D]."""
    repeat = query.shape[1] // key.shape[1]
    left, right = call.window_size
    for first, last, low, high in zip(
        call.query_bounds[:-1], call.query_bounds[1:], call.key_bounds[:-1], call.key_bounds[1:], strict=True,
    ):
        keys, values = (x[low:high].repeat_interleave(repeat, 1).transpose(0, 1) for x in (key, value))
        scores = query[first:last].transpose(0, 1) @ keys.mT * scale
        num_queries, num_keys = scores.shape[1:]
        assert num_queries <= call.most_queries and num_keys <= call.most_keys
        ahead = torch.arange(num_keys) - (torch.arange(num_queries)[:, None] + num_keys - num_queries)
        hidden = ((ahead < -left) if left >= 0 else torch.zeros_like(ahead, dtype=torch.bool)) | ((ahead > right) if right >= 0 else False)
        yield slice(first, last), scores.masked_fill(hidden, -torch.inf), values


@pytest.fixture
def slow_kernel(monkeypatch):
    monkeypatch.setattr(varlen, "_kernel", lambda: (slow_forward, slow_backward))
    monkeypatch.setattr(varlen, "_DEVICES", {"cpu"})
    monkeypatch.setattr(varlen, "_DTYPES", {torch.float64})


@pytest.mark.usefixtures("slow_kernel")
@pytest.mark.parametrize("window", [None, 1, 4, 11])
@pytest.mark.parametrize("name", ROWS)
def test_attention_and_its_gradients_equal_a_loop_over_tokens(name, window):
    row = ROWS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, len(row), 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    weights = torch.randn(1, len(row), 4, 8, dtype=torch.float64)
    plan = build_plan(row)
    got, _ = packed_attention(torch.nn.Module(), *inputs, None, scaling=0.3, sliding_window=window, attention_plan=plan)
    assert "_Varlen" in repr(got.grad_fn.next_functions)
    expected = slow_attention(*inputs, row.segments, 0.3, window=window)
    torch.testing.assert_close(got, expected)
    found, wanted = (torch.autograd.grad((output * weights).sum(), inputs) for output in (got, expected))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not plan._masks, "no mask was made"


def test_the_keys_of_a_prefix_are_read_once_for_all_samples_that_share_it():
    own, shared = build_plan(make_row([8, 8, 3, 3, 3, 5], [-1, -1, 0, 0, 1, 0])).varlen.calls(None)
    assert own.query_index is own.key_index is None
    assert own.query_bounds.tolist() == own.key_bounds.tolist() == [0, 8, 16, 19, 22, 25, 30]
    assert shared.query_index.tolist() == [*range(16, 22), *range(25, 30), 22, 23, 24]
    assert shared.query_bounds.tolist() == [0, 11, 14]
    assert shared.key_index.tolist() == [*range(16)]
    assert (shared.most_queries, shared.most_keys, shared.window_size) == (11, 8, [-1, -1])


def test_the_kernel_serves_half_precision_on_a_gpu_alone():
    half = torch.zeros(3, 2, 64, dtype=torch.bfloat16)
    assert not varlen.serves(half, half, half, dropout=0.0, plain=True), "this is a CPU"
    for query in (half, half.float(), half[..., :20]):
        answers = varlen.serves(*[_on_gpu(query)] * 3, dropout=0.0, plain=True)
        assert answers == (query is half)
    there = _on_gpu(half)
    assert not varlen.serves(there, there, there, dropout=0.0, plain=False)
    assert not varlen.serves(there, there, there, dropout=0.1, plain=True)
    assert not varlen.serves(there, there, _on_gpu(half[..., :32]), dropout=0.0, plain=True), "values of latent attention are narrower"
    assert not varlen.serves(there, there, _on_gpu(half.float()), dropout=0.0, plain=True)


def _on_gpu(tensor):
    """What is asked about a tensor, of one that is on a GPU."""
    return SimpleNamespace(device=torch.device("cuda"), dtype=tensor.dtype, shape=tensor.shape)


def test_torch_still_has_the_kernel_under_the_arguments_that_are_used(monkeypatch):
    calls = build_plan(make_row([4, 2, 3], [-1, 0, 0]), "meta").varlen.calls(None)
    monkeypatch.setattr(varlen, "_DEVICES", {"meta"})
    query = torch.empty(9, 4, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    key = torch.empty(9, 2, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    for chosen in (calls, build_plan(make_row([4, 2, 3], [-1, 0, 0]), "meta").varlen.calls(2)):
        out = varlen.varlen_attention(query, key, key, chosen, scale=None)
        out.sum().backward()
        assert (out.shape, query.grad.shape, key.grad.shape) == (query.shape, query.shape, key.shape)


def flash_forward(q, k, v, query_bounds, key_bounds, most_queries, most_keys, _p, causal, _debug, *, scale=None, window_size_left=None,
                  window_size_right=None, **_unused):
    """`aten::_flash_attention_forward` for a CPU, by the slow kernel."""
    call = SimpleNamespace(
        query_bounds=query_bounds, key_bounds=key_bounds, most_queries=most_queries, most_keys=most_keys,
        window_size=_window(causal, window_size_left, window_size_right))
    out, lse = slow_forward(q, k, v, call, q.shape[-1] ** -0.5 if scale is None else scale)
    return out, lse.float(), torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def flash_backward(grad, q, k, v, out, lse, query_bounds, key_bounds, most_queries, most_keys, _p, causal, _state, _unused, *, scale=None,
                   window_size_left=None, window_size_right=None):
    call = SimpleNamespace(
        query_bounds=query_bounds, key_bounds=key_bounds, most_queries=most_queries, most_keys=most_keys,
        window_size=_window(causal, window_size_left, window_size_right))
    return slow_backward(grad, q, k, v, out, lse.to(q.dtype), call, q.shape[-1] ** -0.5 if scale is None else scale)


def _window(causal, left, right):
    """The sides of a window, -1 without a bound."""
    left, right = (-1 if side is None else side for side in (left, right))
    return [left, 0] if causal else [left, right]


def before_torch_2_12(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None, window_size=None):
    """The operator with the arguments of torch 2.11."""
    return torch.ops.torch_attn._varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, window_size, True)


@pytest.fixture(params=["as it is", "as of torch 2.11"])
def operator(request, monkeypatch):
    """Torch's own operator over a CPU kernel, whose place the device's takes on a GPU."""
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_flash_attention_forward", flash_forward, "CPU")
    aten.impl("_flash_attention_backward", flash_backward, "CPU")
    if request.param == "as of torch 2.11":
        old = torch.library.Library("offbeat_tests", "DEF")
        old.define("_varlen_attn(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor cu_seq_k, SymInt max_q, SymInt max_k, "
                   "bool is_causal=False, float? scale=None, SymInt[]? window_size=None) -> (Tensor, Tensor, Tensor)")
        old.impl("_varlen_attn", before_torch_2_12, "CPU")
        ops = SimpleNamespace(
            _varlen_attn=torch.ops.offbeat_tests._varlen_attn, _varlen_attn_backward=torch.ops.torch_attn._varlen_attn_backward)
        monkeypatch.setattr(torch, "ops", SimpleNamespace(torch_attn=ops))
    varlen._kernel.cache_clear()
    varlen._kernel()
    monkeypatch.undo()
    monkeypatch.setattr(varlen, "_DEVICES", {"cpu"})
    monkeypatch.setattr(varlen, "_DTYPES", {torch.float32})
    yield
    varlen._kernel.cache_clear()
    aten._destroy()
    if request.param == "as of torch 2.11":
        old._destroy()


@pytest.mark.usefixtures("operator")
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", ROWS)
def test_torchs_own_operator_takes_what_it_is_given_in_old_versions_and_new_ones(name, window):
    row = ROWS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, len(row), 8, requires_grad=True) for heads in (4, 2, 2)]
    weights = torch.randn(1, len(row), 4, 8)
    got, _ = packed_attention(
        torch.nn.Module(), *inputs, None, scaling=0.3, sliding_window=window, attention_plan=build_plan(row))
    assert "_Varlen" in repr(got.grad_fn.next_functions)
    expected = slow_attention(*inputs, row.segments, 0.3, window=window)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    found, wanted = (torch.autograd.grad((output * weights).sum(), inputs) for output in (got, expected))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)
