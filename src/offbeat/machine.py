"""Resources of this machine or its container. Torch-free."""

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The variable that restricts which accelerators a process sees; ROCm reads it, too."""
PROMISED_DEVICES = "OFFBEAT_NUM_DEVICES"
"""The variable that tells a worker how many accelerators it was given; 0 for the CPU."""

_DEVICE_FILES = ("nvidia[0-9]*", "dxg", "kfd", "davinci[0-9]*", "dri/renderD*")
_NONE_VISIBLE = ("", "-1", "NoDevFiles")
_SMI_TIMEOUT_S = 20.0
_FIRST_WITH_BF16 = 8.0
"""Compute capability of NVIDIA's Ampere, the first generation whose products are as fast in bfloat16 as in half precision."""
_FIRST_WITH_FP8 = 8.9
"""Compute capability of NVIDIA's Ada, the first generation with products of 8-bit floats."""


@dataclass(frozen=True)
class Device:
    """An accelerator as its driver describes it: name, memory, whether it computes in bfloat16, and in 8-bit floats if known."""

    name: str
    total_bytes: int
    has_bf16: bool
    has_fp8: bool | None = None


def machine_bytes() -> int:
    """Memory of this machine in bytes, or its container's limit if that is lower."""
    limit = cgroup("memory.max")
    total = psutil.virtual_memory().total
    return min(total, int(limit)) if limit.isdigit() else total


def cgroup(name: str) -> str:
    """Contents of a file of this process's control group, as seen from inside a container; "" if there is none."""
    try:
        return (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").strip()
    except OSError:
        return ""  # no limit is set, or the system is not Linux


def visible_devices(environ: Mapping[str, str] = os.environ, *, dev: Path = Path("/dev")) -> list[str]:
    """Return the CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them, such as ["0", "1"].

    Devices of other makes are not found; CUDA_VISIBLE_DEVICES and explicit numbers of devices work for those that read it.
    """
    given = environ.get(VISIBLE_DEVICES)
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        # As CUDA reads it: names after an invalid one are not visible either.
        return names[: next((index for index, name in enumerate(names) if name in _NONE_VISIBLE), len(names))]
    count = len(list(dev.glob("nvidia[0-9]*"))) or (_ask_driver() if (dev / "dxg").exists() else 0)
    return [str(index) for index in range(count)]


def smallest_device(environ: Mapping[str, str] = os.environ) -> Device | None:
    """Return the visible device with the least memory, as nvidia-smi describes it, which takes a second; None if it does not."""
    visible = set(visible_devices(environ))
    found = []
    for line in _smi("--query-gpu=index,uuid,name,memory.total,compute_cap", "--format=csv,noheader,nounits").splitlines():
        index, uuid, name, mebibytes, capability = ([part.strip() for part in line.split(",")] + [""] * 5)[:5]
        if (index in visible or any(uuid.startswith(one) for one in visible)) and mebibytes.isdigit():
            known = float(capability) if capability.replace(".", "", 1).isdigit() else None
            has_fp8 = None if known is None else known >= _FIRST_WITH_FP8
            found.append(Device(name, int(mebibytes) * 2**20, known is not None and known >= _FIRST_WITH_BF16, has_fp8))
    return min(found, key=lambda device: device.total_bytes, default=None)


def has_devices(dev: Path = Path("/dev")) -> bool:
    """Whether the system shows an accelerator of any make, even one that this process may not see."""
    return any(next(dev.glob(pattern), None) for pattern in _DEVICE_FILES)


def torch_is_for_cpus() -> bool:
    """Whether the installed torch was built without accelerators, by its version; False if there is none."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def _ask_driver() -> int:
    """Count devices by nvidia-smi, which takes a second; needed where Linux runs inside Windows and has no device files."""
    return sum(line.startswith("GPU ") for line in _smi("-L").splitlines())


def _smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; "" if there is none, or it does not answer."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return ""
    try:
        return subprocess.run([smi, *arguments], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
