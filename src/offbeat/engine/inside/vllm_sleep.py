"""A vLLM server's sleep, as far as vLLM does not do it by itself. Used by `vllm_inside`.

On accelerators vLLM frees the memory of its cache and weights, if it was started with --enable-sleep-mode. On a CPU vLLM frees nothing:
there, the pages of the cache are given back to the system, and the weights stay.
"""

import ctypes
import mmap
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm_files import RefusedError

_DONTNEED = getattr(mmap, "MADV_DONTNEED", None)


def check_sleep(engine: Any, *, on_cpu: bool) -> None:
    """Check that an engine frees memory when it is put to sleep.

    Raises:
        RefusedError: it was started without the flag that this takes.
    """
    if not on_cpu and not engine.vllm_config.model_config.enable_sleep_mode:
        raise RefusedError("this server cannot be put to sleep, because it runs without --enable-sleep-mode")


def drop_pages(tensors: Iterable[Tensor]) -> None:
    """Give the pages that lie wholly within these tensors, in host memory, back to the system; when they are used again, they are zeros.

    Nothing happens where the system has no such call.
    """
    if _DONTNEED is None:
        return
    advise = ctypes.CDLL(None, use_errno=True).madvise
    for tensor in tensors:
        storage = tensor.untyped_storage()
        first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0 and advise(ctypes.c_void_p(first), ctypes.c_size_t(length), _DONTNEED):
            raise OSError(ctypes.get_errno(), "the pages of the cache could not be given back")
