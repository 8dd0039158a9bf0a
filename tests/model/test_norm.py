import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from offbeat.model.load import load_causal_lm
from offbeat.model.norm import use_fast_norms
from train_samples import build_model


@pytest.mark.parametrize("shape", [(3, 8), (1, 5, 8), (1, 5, 2, 8)])
def test_the_fast_norm_and_its_gradients_equal_the_slow_one(shape):
    torch.manual_seed(0)
    slow, fast = Qwen3RMSNorm(8), Qwen3RMSNorm(8)
    with torch.no_grad():
        slow.weight.copy_(torch.randn(8))
        fast.weight.copy_(slow.weight)
    assert use_fast_norms(fast) == 1
    x, weights = torch.randn(shape, requires_grad=True), torch.randn(shape)
    torch.testing.assert_close(fast(x), slow(x), rtol=1e-6, atol=1e-6)
    expected = torch.autograd.grad((slow(x) * weights).sum(), (x, slow.weight))
    got = torch.autograd.grad((fast(x) * weights).sum(), (x, fast.weight))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_lower_precision_without_autocast_goes_through_the_original_on_a_cpu():
    slow, fast = Qwen3RMSNorm(8), Qwen3RMSNorm(8)
    use_fast_norms(fast)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    assert fast(x).equal(slow(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_a_norm_computes_in_float32_and_rounds_its_result_once(dtype):
    torch.manual_seed(0)
    fast = Qwen3RMSNorm(8)
    fast.weight.data.copy_(torch.randn(8).to(dtype))
    exact = Qwen3RMSNorm(8).double()
    exact.weight.data.copy_(fast.weight.data)
    assert use_fast_norms(fast) == 1
    x = torch.randn(3, 8).to(dtype).requires_grad_()
    leaf = x.detach().double().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = fast(x)
    wanted = leaf * (leaf.square().mean(-1, keepdim=True) + exact.variance_epsilon).rsqrt() * exact.weight
    assert got.equal(wanted.float().bfloat16())
    found = torch.autograd.grad(got.sum(), (x, fast.weight))
    for mine, theirs in zip(found, torch.autograd.grad(wanted.sum(), (leaf, exact.weight)), strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=2e-2, rtol=1e-2)


def test_under_autocast_only_the_norms_of_layers_round(tmp_path):
    model = load_causal_lm(build_model(tmp_path))
    seen = {}
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.register_forward_hook(lambda _, __, output, name=name: seen.update({name: output.dtype}))
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    assert seen.pop("model.norm") == torch.float32, "the head may compute in float32"
    assert set(seen.values()) == {torch.bfloat16}


def test_a_norm_of_another_formula_is_left_alone():
    assert use_fast_norms(GemmaRMSNorm(8)) == 0
