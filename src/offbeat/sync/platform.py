"""The only place that knows which accelerator a process has.

Worker code asks `current_platform` for a device, a backend or a synchronisation and never names a device type. A new accelerator is a new
row of the table below. Nothing is looked up at import: the first use in a process decides, so that a launcher can restrict the visible
devices first.
"""

import os
import resource
import sys
import time
from dataclasses import dataclass
from functools import cached_property

import torch

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


class Platform:
    """The device type of this process, decided at the first use of any property."""

    @cached_property
    def device_type(self) -> str:
        """torch's name of the device type; "cpu" when there is no accelerator, one that is not in the table, or a promise of none.

        Raises:
            MachineError: this process was promised a device, and there is none, or not as many.
        """
        promised = os.environ.get(PROMISED_DEVICES, "")
        accelerator = torch.accelerator.current_accelerator(check_available=True) if promised != "0" else None
        kind = accelerator.type if accelerator is not None and accelerator.type in _KINDS else "cpu"
        count = torch.accelerator.device_count() if kind != "cpu" else 0
        if promised and count < int(promised):
            shown = os.environ.get(VISIBLE_DEVICES)
            where = "" if shown is None else f", where {VISIBLE_DEVICES} = {shown!r}"
            raise MachineError(
                f"this process was promised {promised} accelerator{'' if promised == '1' else 's'}, and torch {torch.__version__} finds"
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

    def busy_clock(self) -> float:
        """Seconds of computation of this thread, from an arbitrary start.

        On a CPU a rank that waits for a peer uses no thread time. An accelerator's waits cannot be told from its work, so all time counts
        there.
        """
        return time.thread_time() if self.is_cpu else time.perf_counter()

    def total_memory(self) -> int:
        """Memory of the device in bytes; it must be an accelerator."""
        return torch.accelerator.get_memory_info()[1]

    def memory(self) -> int:
        """Peak memory of this process in bytes: allocated on the device, or resident on a CPU."""
        if not self.is_cpu:
            return torch.accelerator.max_memory_allocated()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB.


current_platform = Platform()
