"""CUDA tensors without a GPU and without torch's build for it: they have shapes, formats and devices, and no numbers.

They take part in CUDA's dispatch, an operation on tensors of two devices raises, and waits of the host are collected. Code that reads a
number gets 1, and numpy reads zeros. There is no backward pass: autograd asks an accelerator for its streams.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from offbeat.sync.platform import Platform
from waits import HostWaits

CUDA = torch.device("cuda", 0)

_ATEN = torch.ops.aten
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
"""In libc10: what switches between devices of a type, by the type's number; nothing where torch was built without it."""

_CUDA_TYPE, _META_TYPE = 1, 14


class _Waits(HostWaits):
    """Gives operations whose result depends on numbers one that has the right format, so that what follows runs, too."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation; a mask counts as true everywhere."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if isinstance(first, FakeTensor):
            first.constant = None  # with its numbers, torch would compute on the device itself
        if first is None or first.device.type != CUDA.type:
            return super().run(func, args, kwargs)
        if func is _ATEN._local_scalar_dense.default:
            return 1.0 if first.is_floating_point() else first.dtype == torch.bool or 1
        if func is _ATEN.equal.default:
            return True
        if func is _ATEN.nonzero.default:
            return first.new_empty((first.numel(), first.dim()), dtype=torch.int64)
        if func in (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default):
            args = (first, [each for index in args[1] for each in _without_masks(index)], *args[2:])
        return super().run(func, args, kwargs)


def _without_masks(index: Tensor | None) -> list[Tensor | None]:
    if index is None or index.dtype != torch.bool:
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]


class _Reads(TorchFunctionMode):
    """Lets numpy read fake tensors, as zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.numpy and isinstance(args[0], FakeTensor):
            return np.zeros(tuple(args[0].shape), str(args[0].dtype).removeprefix("torch."))
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_cuda() -> Iterator[HostWaits]:
    """Give tensors on `CUDA` meaning within the context, in which the process's device is that one; yields the waits for it."""
    waits = _Waits()
    with (
        _lent_guard(), mock.patch.object(Platform, "device", CUDA), mock.patch.object(Platform, "device_type", CUDA.type),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)), FakeTensorMode(allow_non_fake_inputs=True), _Reads(), waits,
    ):
        yield waits


@contextmanager
def _lent_guard() -> Iterator[None]:
    """Let meta tensors' switch between devices, which does nothing, stand for CUDA's: indexing and autograd's graph ask for one."""
    guards = (ctypes.c_void_p * (_META_TYPE + 1)).in_dll(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so")), _GUARDS)
    assert guards[_META_TYPE] is not None, f"torch {torch.__version__} keeps its devices in another order"
    own, guards[_CUDA_TYPE] = guards[_CUDA_TYPE], guards[_META_TYPE]
    try:
        yield
    finally:
        guards[_CUDA_TYPE] = own
