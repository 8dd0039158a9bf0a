"""A model's whole weights, in the number format in which they are published. `weight_exchange` does this for a model in shards."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.model.checkpoint_names import published_names
from offbeat.pulse import progress
from offbeat.trainer.messages import Dtype
from offbeat.trainer.strategies import whole_tensor

_DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@torch.no_grad()
def full_state(model: nn.Module, *, dtype: Dtype, keep: bool, copies: bool = True) -> dict[str, Tensor]:
    """Return all weights on the CPU; collective if they are in shards.

    Args:
        model: unwrapped, or sharded with FSDP2.
        dtype: number format of the result.
        keep: whether this rank needs them; otherwise it takes part and gets an empty dictionary.
        copies: whether weights that are on the CPU in `dtype` already are copied, too; otherwise the next step changes the result.

    Returns:
        Parameters, tied ones once, and the buffers that a checkpoint holds, by their names in `model.state_dict()`, such as
        "lm_head.weight" [V, H].
    """
    state = {}
    for name, tensor in owned(model):
        progress("copy_weights")
        full = whole_tensor(tensor.detach())
        if keep:
            state[name] = full.to("cpu", target_dtype(full, dtype), copy=copies)
    return state


def as_dtype(state: Mapping[str, Tensor], dtype: Dtype) -> dict[str, Tensor]:
    """Convert the floating-point tensors of `state`, such as "lm_head.weight" [V, H], to `dtype`."""
    return {name: tensor.to(target_dtype(tensor, dtype)) for name, tensor in state.items()}


def target_dtype(tensor: Tensor, dtype: Dtype) -> torch.dtype:
    """Return the number format in which a tensor is published: `dtype`, or its own if it holds no fractions."""
    return _DTYPES[dtype] if tensor.is_floating_point() else tensor.dtype


@contextmanager
def rounded(model: nn.Module, dtype: Dtype) -> Iterator[None]:
    """Round a model's weights as they are published while the body runs, on every rank; activations keep their number format.

    A step may be lost in rounding, above all if the weights come from a checkpoint in that format: then the policy that engines sample has
    not moved, although the trainer's has. Meanwhile the weights exist twice.
    """
    wanted = _DTYPES[dtype]
    coarser = [p for p in model.parameters() if p.is_floating_point() and torch.finfo(p.dtype).eps < torch.finfo(wanted).eps]
    kept = [parameter.detach().clone() for parameter in coarser]
    with torch.no_grad():
        for parameter in coarser:
            parameter.copy_(parameter.to(wanted))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, exact in zip(coarser, kept, strict=True):
                parameter.copy_(exact)


def parameter_bytes(model: PreTrainedModel, state: Mapping[str, Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (published name, [B] uint8) of each parameter in `state`; an engine finds the same in the files that it loads."""
    for name, tensor in published_names(model, {name: state[name] for name, _ in model.named_parameters() if name in state}).items():
        yield name, tensor.contiguous().view(-1).view(torch.uint8).numpy()


def owned(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of `full_state`, as this rank holds them, such as ("lm_head.weight", [V / R, H])."""
    yield from model.named_parameters()
    parameter_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    yield from ((name, tensor) for name, tensor in model.state_dict().items() if name not in parameter_names)
