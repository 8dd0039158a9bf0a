"""Memory of one process in another on the same device, without a copy through the host: CUDA's IPC handles, or shared memory on a CPU.

A handle is a list of numbers and bytes, written as JSON; nothing is unpickled. torch has public functions for pickled ones alone, so those
are called on which `torch.multiprocessing` is built. The owner keeps the memory until all others have let go of it.
"""

from typing import Any

import torch
from torch import Tensor


def share(buffer: Tensor) -> list[Any]:
    """Return the handle of a [bytes] uint8 tensor that has its storage to itself; on a CPU, the tensor is moved into shared memory."""
    storage = buffer.untyped_storage()
    parts = storage._share_cuda_() if buffer.device.type != "cpu" else storage._share_filename_cpu_()
    return [{"hex": part.hex()} if isinstance(part, bytes) else part for part in parts]


def open_shared(handle: list[Any], device: torch.device) -> Tensor:
    """Return the memory of a handle as a [bytes] uint8 tensor on the device where its owner has it."""
    parts = [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in handle]
    if device.type != "cpu":
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(*parts)
    else:
        storage = torch.UntypedStorage._new_shared_filename_cpu(*parts)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
