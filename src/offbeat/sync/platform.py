"""The only place that knows which accelerator a process has.

Worker code asks `current_platform` for a device, a backend or a synchronisation and never names a device type. A new accelerator is a new
row of the table below. Nothing is looked up at import but at a process's first use, so that a launcher can restrict the visible devices.
"""

import ctypes
import os
import re
import resource
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd import Variable

from offbeat.errors import MachineError
from offbeat.machine import PROMISED_DEVICES, VISIBLE_DEVICES


@dataclass(frozen=True)
class _Kind:
    backend: str
    visible_devices_variable: str


# By torch's name of the device type: its collective backend, and the variable that restricts which devices a process sees.
_KINDS = {
    "cpu": _Kind("gloo", ""),
    "cuda": _Kind("nccl", "CUDA_VISIBLE_DEVICES"),  # ROCm reads the same variable and uses the same names
    "xpu": _Kind("xccl", "ZE_AFFINITY_MASK"),
    "npu": _Kind("hccl", "ASCEND_RT_VISIBLE_DEVICES"),
}


_PEAKS = (
    ("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H100", 989e12), ("H800", 989e12), ("H200 NVL", 835e12), ("H200", 989e12),
    ("GH200", 989e12), ("H20", 148e12), ("B200", 2250e12), ("GB200", 2500e12), ("A100", 312e12), ("A800", 312e12), ("L40S", 362e12),
    ("L40", 181e12), ("L4", 121e12), ("MI300X", 1307e12), ("MI325X", 1307e12), ("MI250X", 383e12))
"""Dense bfloat16 operations per second, from the makers' data sheets, by words of a device's name; the first row that fits.

For example, "NVIDIA H100 80GB HBM3" has the words of "H100".
"""


_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
"""Gives memory that the C library keeps back to the system, wherever it is; None without glibc."""


class Stopwatch(ABC):
    """Adds up the stretches in which a device computes for this thread, without its waits for peers.

    Each stretch begins with `start` and ends with the first `stop` that follows.
    """

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def take_s(self) -> float:
        """Return the seconds of all stretches so far, and forget them; waits for the device to have ended the last one."""

    def stop_after_backward(self, loss: Tensor) -> None:
        """Stop when the backward pass from `loss`, a scalar [], has computed its gradients, before it waits for other ranks."""
        # DDP and FSDP queue their final waits later than this callback, so they run after it.
        loss.register_hook(lambda _gradient: Variable._execution_engine.queue_callback(self.stop))


class _ThreadStopwatch(Stopwatch):
    """Stopwatch of a CPU: a thread that waits uses no CPU time."""

    def __init__(self) -> None:
        self._sum_s = 0.0
        self._since_s: float | None = None

    def start(self) -> None:
        self._since_s = time.thread_time()

    def stop(self) -> None:
        if self._since_s is not None:
            self._sum_s += time.thread_time() - self._since_s
            self._since_s = None

    def take_s(self) -> float:
        taken, self._sum_s = self._sum_s, 0.0
        return taken


class _EventStopwatch(Stopwatch):
    """Stopwatch of an accelerator: events in its current stream, so that neither start nor stop waits for it."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._stretches: list[tuple[torch.Event, torch.Event]] = []
        self._begun: torch.Event | None = None

    def start(self) -> None:
        self._begun = self._mark()

    def stop(self) -> None:
        if self._begun is not None:
            self._stretches.append((self._begun, self._mark()))
            self._begun = None

    def take_s(self) -> float:
        stretches, self._stretches = self._stretches, []
        if stretches:
            stretches[-1][1].synchronize()
        return sum(begun.elapsed_time(ended) for begun, ended in stretches) / 1e3

    def _mark(self) -> torch.Event:
        event = torch.Event(self._device_type, enable_timing=True)
        event.record()
        return event


class Platform:
    """The device type of this process, decided at the first use of any property."""

    @cached_property
    def device_type(self) -> str:
        """torch's name of the device type; "cpu" when there is no accelerator, one that is not in the table, or a promise of none.

        Raises:
            MachineError: this process was assigned a device, and there is none, or not as many.
        """
        promised = os.environ.get(PROMISED_DEVICES, "")
        accelerator = torch.accelerator.current_accelerator(check_available=True) if promised != "0" else None
        kind = accelerator.type if accelerator is not None and accelerator.type in _KINDS else "cpu"
        count = torch.accelerator.device_count() if kind != "cpu" else 0
        if promised and count < int(promised):
            shown = os.environ.get(VISIBLE_DEVICES)
            where = "" if shown is None else f", where {VISIBLE_DEVICES} = {shown!r}"
            raise MachineError(
                f"this process was assigned {promised} accelerator{'' if promised == '1' else 's'}, and torch {torch.__version__} finds"
                f" {count or 'none'}{where}; nvidia-smi says whether the driver works, and train.devices_per_rank = 0 and"
                f" inference.devices_per_engine = 0 with {VISIBLE_DEVICES}= (empty) compute on the CPU")
        return kind

    @property
    def device(self) -> torch.device:
        """The device that this process computes on: the one chosen by `set_device`, else the first visible one."""
        return torch.device("cpu") if self.is_cpu else torch.device(self.device_type, torch.accelerator.current_device_index())

    @property
    def backend(self) -> str:
        """Collective backend of the device, as `torch.distributed` names it."""
        return _KINDS[self.device_type].backend

    @property
    def visible_devices_variable(self) -> str:
        """Environment variable that restricts which devices a process sees; empty on a CPU."""
        return _KINDS[self.device_type].visible_devices_variable

    @property
    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def set_device(self, local_rank: int) -> None:
        """Compute on the visible device with this index from now on; does nothing on a CPU."""
        if not self.is_cpu:
            torch.accelerator.set_device_index(local_rank)

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work; does nothing on a CPU, where nothing is queued."""
        if not self.is_cpu:
            torch.accelerator.synchronize()

    def stopwatch(self) -> Stopwatch:
        """Return a stopwatch for the computation of this thread."""
        return _ThreadStopwatch() if self.is_cpu else _EventStopwatch(self.device_type)

    @property
    def device_name(self) -> str:
        """Name of the device by its driver, such as "NVIDIA H100 80GB HBM3"; empty on a CPU."""
        return "" if self.is_cpu else torch.get_device_module(self.device_type).get_device_name(self.device)

    @property
    def peak_flop_per_s(self) -> float:
        """Dense bfloat16 operations per second that the device's maker states; 0 on a CPU, and where the table has no such device."""
        return peak_of(self.device_name)

    def total_memory(self) -> int:
        """Memory of the device in bytes; it must be an accelerator."""
        return torch.accelerator.get_memory_info()[1]

    def return_memory(self) -> None:
        """Return memory that this process has freed to the device, or on a CPU to the system: allocators keep it for the next use."""
        if not self.is_cpu:
            torch.accelerator.empty_cache()
        elif _TRIM is not None:
            _TRIM(0)

    def memory(self) -> int:
        """Peak memory of this process in bytes: allocated on the device, or resident on a CPU."""
        if not self.is_cpu:
            return torch.accelerator.max_memory_allocated()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB.


def peak_of(device_name: str) -> float:
    """Return the dense bfloat16 operations per second of a device by its driver's name; 0 if it is unknown, or a part of a device."""
    words = set(re.split(r"[\s-]+", device_name))
    return 0.0 if "MIG" in words else next((peak for name, peak in _PEAKS if words.issuperset(name.split())), 0.0)


current_platform = Platform()
