"""Copies from the host to the device without waiting: rows, losses and adapters upload the arrays of a pass.

A plain `tensor.to(device)` from pageable memory returns when the device has finished all earlier work, so one in the
middle of a micro-batch leaves the device without work until the host has launched the rest.
"""

import numpy as np
import torch
from torch import Tensor
from torch._guards import detect_fake_mode


def upload(array: np.ndarray | Tensor, device: torch.device | str) -> Tensor:
    """Return an array, or a tensor of the host, as a tensor of the device, usable at once; on a CPU it is the same memory."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    device = torch.device(device)
    if device.type == "cpu":
        return tensor
    if device.type != "meta" and detect_fake_mode() is None:
        tensor = tensor.pin_memory()  # torch reuses this memory only when the copy is done
    return tensor.to(device, non_blocking=True)
