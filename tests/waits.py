"""Host waits, counted on tensors without values: what on a GPU would stop the host until the device has done all that it was given."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
"""In the place of an accelerator: its tensors have no values, so an operation whose result's shape depends on them raises."""

_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class HostWaits(TorchDispatchMode):
    """Collects the operations that wait, as `found`: those that read values of a tensor, and copies that block between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        masks = func is torch.ops.aten.index.Tensor and any(leaf.dtype in (torch.bool, torch.uint8) for leaf in given[1:])
        on_device = any(leaf.device == DEVICE for leaf in given)
        if on_device and (masks or (func is not torch.ops.aten.index.Tensor and any(tag in func.tags for tag in _READS))):
            self.found.append(str(func))
        result = func(*args, **kwargs)
        blocks = not (kwargs.get("non_blocking") or (func is torch.ops.aten.copy_.default and len(args) > 2 and args[2]))
        devices = {leaf.device.type for leaf in (*given, result) if isinstance(leaf, Tensor) and leaf.dim()}
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default) and len(devices) > 1 and blocks:
            self.found.append(f"{func} {tuple(given[0].shape)}")
        return result
