"""Instruction sets of this machine's CPU, read once from the system, without those that the environment masks. Torch-free.

`runs/step_choice.py` takes the number format of engines from it where that is left open, and warns about a slow one; `offbeat doctor` shows
it. Products in bfloat16 are quick only with instructions for them: without, they were measured at a fourth of the speed of float32 with
AVX-512, and at a tenth to a hundredth with AVX2.
"""

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_X86 = (("AMX", "amx_bf16"), ("AVX-512 with bf16", "avx512_bf16"), ("AVX-512", "avx512bw"), ("AVX2", "avx2"), ("AVX", "avx"))
"""Instruction sets, the widest first, each with the flag by which the system names it."""
_NARROWEST = "SSE"
_WITH_BF16 = ("AMX", "AVX-512 with bf16")

_MASKS = {
    "ONEDNN_MAX_CPU_ISA": {
        "SSE41": "SSE", "AVX": "AVX", "AVX2": "AVX2", "AVX2_VNNI": "AVX2", "AVX2_VNNI_2": "AVX2", "AVX512_CORE": "AVX-512",
        "AVX512_CORE_VNNI": "AVX-512", "AVX512_CORE_BF16": "AVX-512 with bf16", "AVX512_CORE_FP16": "AVX-512 with bf16",
        "AVX10_1_512": "AVX-512 with bf16"},
    "ATEN_CPU_CAPABILITY": {"DEFAULT": "SSE", "AVX2": "AVX2"},
}
"""Variables that keep oneDNN and torch from wider instructions: the widest allowed set, by value; other values have no effect."""


@dataclass(frozen=True)
class Cpu:
    """A CPU as torch may use it.

    Attributes:
        name: the maker's name for it.
        instructions: the widest set of them, such as "AVX2".
        has_bf16: whether it has instructions for products in bfloat16, and torch uses them.
        mask: the variable that keeps torch from wider ones, such as "ATEN_CPU_CAPABILITY"; empty without one.
    """

    name: str
    instructions: str
    has_bf16: bool
    mask: str = ""

    def __str__(self) -> str:
        return f"{self.name}, {self.instructions}" + (f" by {self.mask}" if self.mask else "")


@cache
def this_cpu() -> Cpu:
    """Return the CPU of this machine, or of a container's host, as this process may use it."""
    if platform.system() == "Darwin":  # torch is built without oneDNN there, and has no quick products in bfloat16 of its own
        return Cpu(_brand_of_apple() or platform.machine(), "NEON" if platform.machine() == "arm64" else "AVX2", has_bf16=False)
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        described = ""
    return read_cpu(described, os.environ)


def read_cpu(described: str, environ: Mapping[str, str]) -> Cpu:
    """Return the CPU that Linux describes in /proc/cpuinfo, under the masks of an environment."""
    found: dict[str, str] = {}
    for line in described.splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    name = found.get("model name") or found.get("Model") or platform.machine()
    if "Features" in found:  # ARM, where torch computes with the Arm Compute Library
        has_bf16 = "bf16" in found["Features"].split()
        return Cpu(name, "NEON with bf16" if has_bf16 else "NEON", has_bf16)
    flags = frozenset(found.get("flags", "").split())
    return _masked(name, next((label for label, flag in _X86 if flag in flags), _NARROWEST), environ)


def _masked(name: str, instructions: str, environ: Mapping[str, str]) -> Cpu:
    order = [label for label, _ in _X86] + [_NARROWEST]
    mask = ""
    for variable, limits in _MASKS.items():
        limit = limits.get(environ.get(variable, "").upper(), order[0])
        if order.index(limit) > order.index(instructions):
            instructions, mask = limit, variable
    return Cpu(name, instructions, instructions in _WITH_BF16, mask)


def _brand_of_apple() -> str:
    try:
        asked = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
