"""Faster RMSNorms, which replace a loaded model's own where both agree.

Called by `load_causal_lm`. Transformers writes the norm as six to eight pointwise operations, which take a large share of a small model's
step on a CPU, and more of a GPU's time than anything else but products. In float32 on a CPU there is one autograd function with a
hand-written backward pass, two to three times faster. Under autocast, and on other devices, it is torch's `rms_norm`, which has a kernel of
its own on CUDA. Under autocast a layer's norm gives the format of the products that follow, so that each of these need not cast it.
"""

from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from offbeat.model.blocks import decoder_layers


class _RMSNorm(torch.autograd.Function):
    """RMSNorm over the last dimension of x [..., D] with weight [D], both float32, and its gradient."""
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        # With n = x / rms(x), dx = (g w - n mean(g w n)) / rms(x).
        product = grad * normed
        mean = torch.matmul(product, weight).div_(product.shape[-1]).unsqueeze(-1)
        grad_x = torch.addcmul(grad * weight, normed, mean, value=-1).mul_(scale)
        return grad_x, product.flatten(0, -2).sum(0), None


def use_fast_norms(model: nn.Module) -> int:
    """Replace the forward of each RMSNorm whose own result agrees with ours to 1e-6; returns how many. Weights may come later."""
    replaced = 0
    of_layers = {module for layer in decoder_layers(model) for module in layer.modules()} if isinstance(model, PreTrainedModel) else {model}
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if type(module).__name__.endswith("RMSNorm") and isinstance(eps, float) and _agrees(module, eps):
            module.forward = MethodType(_fast_forward(type(module).forward, eps, rounds=module in of_layers), module)
            replaced += 1
    return replaced


def _fast_forward(slow_forward, eps: float, *, rounds: bool):
    """Return a forward method; if it `rounds`, its results under autocast are in autocast's format."""
    def forward(self, hidden_states: Tensor) -> Tensor:
        kind = hidden_states.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                normed = fused_norm(hidden_states, self.weight, eps)
            return normed.to(torch.get_autocast_dtype(kind)) if rounds else normed
        if kind != "cpu":
            return fused_norm(hidden_states, self.weight, eps)
        # A CPU has no kernel for lower precision, where the original's order of rounding is kept.
        if hidden_states.dtype == self.weight.dtype == torch.float32:
            return _RMSNorm.apply(hidden_states, self.weight, eps)
        return slow_forward(self, hidden_states)

    return forward


@torch.no_grad()
def _agrees(module: nn.Module, eps: float) -> bool:
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 1:
        return False
    x, held = torch.linspace(-1, 1, 4 * len(weight)).view(4, -1), module._parameters["weight"]
    stand_in = module._parameters["weight"] = nn.Parameter(torch.linspace(0.5, 1.5, len(weight)))
    try:
        return torch.allclose(type(module).forward(module, x), _RMSNorm.apply(x, stand_in, eps), rtol=1e-6, atol=1e-6)
    finally:
        module._parameters["weight"] = held


def fused_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm x [..., D] by a single kernel where its device has one, which computes in float32; the result is in the format of x."""
    if torch.compiler.is_compiling():  # which makes a kernel of this and of what is around it
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)
    return rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)
