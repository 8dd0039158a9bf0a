"""A pretended accelerator: its tensors claim to be on a device of their own and compute on the CPU, with the numbers that the CPU gives.

So a test on any machine finds what a real accelerator would refuse, an operation on tensors of both devices, and what would slow it down, a
host that waits for it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("meta")  # the one device besides the CPU that every build of torch can name
_ATEN = torch.ops.aten
_WAITS = {
    _ATEN._local_scalar_dense.default, _ATEN.is_nonzero.default, _ATEN.equal.default, _ATEN.nonzero.default, _ATEN.masked_select.default,
    _ATEN.repeat_interleave.Tensor,
}
"""The host needs the result, or its size, before it can go on."""
_INDEXES = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default}
"""These wait where an index is a mask."""


class Held(Tensor):
    """A tensor on `DEVICE`; its numbers are in `host`."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> "Held":
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset()}
        held = Tensor._make_wrapper_subclass(cls, host.shape, **layout, dtype=host.dtype, device=DEVICE)
        held.host = host
        return held

    @property
    def data(self) -> "Held":
        return Held(self.host)

    @data.setter
    def data(self, other: "Held") -> None:
        self.host = other.host

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} on {DEVICE} outside of its context")


class Accelerator(TorchDispatchMode):
    """Gives `DEVICE` meaning within its context.

    Attributes:
        num_waits: times that the host waited for the device: copies to it, and reads of a number or of a size that depends on numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        with self:  # in inference mode, operations made of others arrive whole
            if (result := function.decompose(*args, **kwargs)) is not NotImplemented:
                return result
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        held = {id(tensor.host): tensor for tensor in tensors if isinstance(tensor, Held)}
        if held and function is not _ATEN._to_copy.default:
            strangers = [tensor for tensor in tensors if not isinstance(tensor, Held) and tensor.dim()]
            assert not strangers, f"{function} mixes tensors of {DEVICE} with one of the host of shape {tuple(strangers[0].shape)}"
        if function is _ATEN._fused_sdp_choice.default and held:
            return SDPBackend.MATH.value
        here = bool(held) if kwargs.get("device") is None else torch.device(kwargs["device"]) == DEVICE
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        masked = function in _INDEXES and any(tensor.dtype == torch.bool for tensor in args[1] if tensor is not None)
        leaves = function is _ATEN._to_copy.default and not here
        self.num_waits += bool(held) and (function in _WAITS or masked or leaves)
        host_args, host_kwargs = tree_map_only(Held, lambda tensor: tensor.host, (args, kwargs))
        result = function(*host_args, **host_kwargs)
        if not here:
            return result
        # What an operation changes in place it returns as the same object.
        return tree_map_only(Tensor, lambda tensor: held[id(tensor)] if id(tensor) in held else Held(tensor), result)
