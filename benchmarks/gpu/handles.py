"""Memory of one process in another on the same device, without a copy through the host: CUDA's IPC handles, or a mapped file on a CPU.

A handle is a list of numbers, text and bytes, written as JSON; nothing is unpickled. torch has public functions for pickled handles of CUDA
alone, so those are called on which `torch.multiprocessing` is built. The owner keeps the memory until all others have let go of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor


@contextmanager
def shared_buffer(num_bytes: int, device: torch.device) -> Iterator[tuple[Tensor, list[Any]]]:
    """Give a [num_bytes] uint8 tensor that others can map, and its handle; nobody may open it after the body."""
    if device.type != "cpu":
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        yield buffer, [{"hex": part.hex()} if isinstance(part, bytes) else part for part in buffer.untyped_storage()._share_cuda_()]
        return
    with TemporaryDirectory() as folder:
        handle = [str(Path(folder) / "buffer"), num_bytes]
        yield open_shared(handle, device), handle


def open_shared(handle: list[Any], device: torch.device) -> Tensor:
    """Return the memory of a handle as a [bytes] uint8 tensor on the device where its owner has it."""
    if device.type == "cpu":
        path, num_bytes = handle
        storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=num_bytes)
    else:
        torch.cuda.init()
        parts = [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in handle]
        storage = torch.UntypedStorage._new_shared_cuda(*parts)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
