import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from offbeat.model.norm import use_fast_norms


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


def test_lower_precision_goes_through_the_original():
    slow, fast = Qwen3RMSNorm(8), Qwen3RMSNorm(8)
    use_fast_norms(fast)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    assert fast(x).equal(slow(x))


def test_a_norm_of_another_formula_is_left_alone():
    assert use_fast_norms(GemmaRMSNorm(8)) == 0
