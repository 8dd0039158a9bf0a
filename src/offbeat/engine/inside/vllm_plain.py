"""Keeps requests without an adapter apart from adapters in vLLM for CPUs. Used by `vllm_worker`.

vLLM gives tokens of such requests the index -1. Its kernels for accelerators skip them. Those for CPUs, in PyTorch, take -1 for the last of
`--max-loras` places: once an adapter has been there, it is added to the model in every request without one that runs beside an adapter's,
and cached prefixes keep it (https://github.com/vllm-project/vllm/pull/48421).
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

_OPS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
"""Operations that select the matrices of each token's adapter; all other operations use them."""


def skip_plain_rows() -> None:
    """Have vLLM's operations for CPUs leave tokens without an adapter alone."""
    from vllm.lora.ops.torch_ops import lora_ops  # noqa: PLC0415 (only vLLM for CPUs needs it)
    from vllm.lora.punica_wrapper import punica_cpu  # noqa: PLC0415

    for module in (lora_ops, punica_cpu):
        for name in _OPS:
            if hasattr(module, name):
                setattr(module, name, on_adapted_rows(getattr(module, name)))


def on_adapted_rows(op: Callable[..., None]) -> Callable[..., None]:
    """Wrap an operation that adds to or sets rows of its third argument, so that rows with the index -1 remain as they are."""

    @wraps(op)
    def apply(inputs: Tensor, matrices: Tensor, output: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> None:
        rows = (indices >= 0).nonzero().squeeze(1)
        if len(rows) == len(indices):
            op(inputs, matrices, output, indices, *args, **kwargs)
        elif len(rows):
            part = output[rows]
            op(inputs[rows], matrices, part, indices[rows], *args, **kwargs)
            output[rows] = part

    return apply


@torch.inference_mode()
def check_plain_rows() -> None:
    """Raise RuntimeError unless, of two tokens, only that of an adapter, which is in the last place, has the adapter added."""
    from vllm.lora.layers import LoRAMapping  # noqa: PLC0415
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU  # noqa: PLC0415

    wrapper, one = PunicaWrapperCPU(2, 2, "cpu"), torch.ones(1, 1, 1, 1)
    wrapper.update_metadata(LoRAMapping((1, 0), (1, 0), is_prefill=True), [1], 1, 1)
    linear, logits = torch.zeros(2, 1), torch.zeros(2, 1)
    wrapper.add_lora_linear(linear, torch.ones(2, 1), (one,), (one,), 1.0, (1,))
    wrapper.add_lora_logits(logits, torch.ones(2, 1), one, one, 1.0)
    if not linear.tolist() == logits.tolist() == [[1], [0]]:
        raise RuntimeError(
            "this vLLM mixes adapters into requests without one, or computes without adapters, on CPUs; use vLLM 0.32, or accelerators")
