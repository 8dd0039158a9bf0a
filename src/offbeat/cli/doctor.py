"""`offbeat doctor`: examines this machine and prints one line for each check, with advice on problems.

torch is queried in a separate process, so the command opens no device context and survives a torch that cannot be imported.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offbeat.agents.tools.sandbox import confinement, described
from offbeat.config.root import Config
from offbeat.cpu import Cpu, this_cpu
from offbeat.machine import cgroup, smallest_device
from offbeat.runs.devices import choose_devices, describe_devices, usable_devices
from offbeat.runs.number_format import format_choice
from offbeat.runs.step_choice import step_choices
from offbeat.runs.threads import usable_cores

_GIB = 2**30
_LOW_DISK_GIB, _LOW_MEMORY_GIB = 5, 2
_TORCH_TIMEOUT_S = 120

# Optional packages, each with its purpose and the command that installs it.
_EXTRAS = {
    "ray": ("runs on many machines", "pip install 'offbeat[ray]'"),
    "datasets": ("data from the Hugging Face hub", "pip install 'offbeat[hub]'"),
    "pyarrow": ("Parquet files", "pip install 'offbeat[hub]'"),
}

_ASK_TORCH = """
import json, torch
accelerator = torch.accelerator.current_accelerator(check_available=True)
count = torch.accelerator.device_count() if accelerator else 0
names = [torch.cuda.get_device_name(i) for i in range(count)] if accelerator and accelerator.type == "cuda" else []
print(json.dumps({"version": torch.__version__, "type": accelerator.type if accelerator else "cpu", "count": count, "names": names}))
"""

DESCRIPTION = """\
Check Python, torch, devices, cores, memory, disk and optional packages, say how to fix what is missing, and show the defaults that a run
would choose on this machine. The exit code is 1 if something is missing that every run needs.
"""

EXAMPLES = """\
examples:
  offbeat doctor
  offbeat doctor --json | jq '.[] | select(.status != "ok")'
"""


@dataclass(frozen=True)
class Check:
    """One line: the subject, such as "torch", a verdict, the finding, and advice if it is not fine.

    "warn" means that a run works without it or will be slow; "fail" means that no run can work.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON list of checks instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print all checks; return 1 if one failed. Raises ConfigError if settings were given, on which no check depends."""
    checks = all_checks()
    if args.json:
        print(json.dumps([asdict(check) for check in checks], indent=2, ensure_ascii=False))
    else:
        _print_table(checks)
    return int(any(check.status == "fail" for check in checks))


def all_checks() -> list[Check]:
    return [
        Check("python", "ok", f"{platform.python_version()} ({platform.system()} {platform.machine()})"),
        Check("offbeat", "ok", importlib.metadata.version("offbeat")),
        check_torch(),
        check_cpu(this_cpu()),
        check_cores(),
        check_threads(os.environ.get("OMP_WAIT_POLICY", "")),
        check_memory(),
        check_disk(Path.cwd()),
        check_port(),
        check_sandbox(),
        *check_defaults(),
        *(check_extra(name) for name in _EXTRAS),
        check_vllm(Path.cwd()),
    ]


def check_torch() -> Check:
    """Import torch in another process and query its devices."""
    try:
        done = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S, check=True)
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Check("torch", "fail", f"did not import within {_TORCH_TIMEOUT_S} s", "try again when the machine is less busy")
    except subprocess.CalledProcessError as exc:
        last = (exc.stderr.strip().splitlines() or [f"exit status {exc.returncode}"])[-1]
        return Check("torch", "fail", last, "needed to train and serve: pip install 'offbeat[train]'")
    devices = f"{answer['count']} × {', '.join(sorted(set(answer['names']))) or answer['type']}" if answer["count"] else "CPU only"
    return Check("torch", "ok", f"{answer['version']}, {devices}")


def check_cpu(cpu: Cpu) -> Check:
    """Say which number formats the CPU multiplies quickly; "auto" chooses among them."""
    return Check("CPU", "ok", f"{cpu}; products in bfloat16 are {'quick' if cpu.has_bf16 else 'many times slower than in float32'}")


def check_cores() -> Check:
    """Check the cores that this process may use, given its affinity and a container's quota."""
    cores = usable_cores()
    if cores < 2:
        return Check("cores", "warn", "1", "trainer and engine will take turns on it; two or more let them overlap")
    return Check("cores", "ok", f"{cores}, divided among train ranks and engines where train.threads and inference.threads are 0")


def check_threads(wait_policy: str) -> Check:
    """Check that idle OpenMP threads do not spin, which would take cores from other threads."""
    if wait_policy.lower() == "active":
        return Check("OMP_WAIT_POLICY", "warn", "active", "unset it: idle threads that spin slow the other processes down")
    return Check("OMP_WAIT_POLICY", "ok", "passive in every worker, which sets it itself")


def check_memory() -> Check:
    """Check the free memory, within a container's limit."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    limit, used = cgroup("memory.max"), cgroup("memory.current")
    if limit.isdigit() and used.isdigit():
        total, available = min(total, int(limit)), min(available, int(limit) - int(used))
    found = f"{available / _GIB:.1f} GiB free of {total / _GIB:.1f}"
    if available < _LOW_MEMORY_GIB * _GIB:
        return Check("memory", "warn", found, f"close other programs; a small run needs {_LOW_MEMORY_GIB} GiB")
    return Check("memory", "ok", found)


def check_disk(folder: Path) -> Check:
    """Check the free space where runs are written by default."""
    free = shutil.disk_usage(folder).free
    found = f"{free / _GIB:.1f} GiB free in {folder}"
    if free < _LOW_DISK_GIB * _GIB:
        return Check("disk", "warn", found, "free space, or put runs elsewhere with run.dir; checkpoints hold weights and optimizer state")
    return Check("disk", "ok", found)


def check_port() -> Check:
    """Check that workers and engines can listen on free ports of the loopback interface."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Check("loopback port", "ok", f"127.0.0.1:{server.getsockname()[1]} can be bound")
    except OSError as exc:
        return Check("loopback port", "fail", exc.strerror or str(exc), "allow processes to listen on 127.0.0.1")


def check_defaults() -> list[Check]:
    """Say how a run of a model would fill in open settings on this machine, and why."""
    devices = usable_devices()
    config = choose_devices(Config.model_validate({"model": {"path": "a model", "dtype": "auto"}}).for_plan, devices=devices)
    device = smallest_device() if config.train.devices_per_rank else None
    placed = describe_devices(config, devices=devices).removeprefix("devices: ")
    found = [Check("devices", "ok", placed or "none that torch can use: train ranks and engines compute on the CPU")]
    auto = format_choice(config, device=device, cpu=this_cpu())
    found.append(Check(auto.setting, "ok", f'float32, and where it is "auto" {auto.value}: {auto.why}'))
    for choice in step_choices(config, device=device, shape=None):
        by_model = device is not None and choice.setting == "train.gradient_checkpointing"
        told = "depends on the size of the model; see offbeat config check CONFIG"
        found.append(Check(choice.setting, "ok", told if by_model else f"{choice.value}: {choice.why}"))
    return found


def check_sandbox() -> Check:
    """Check how the Python tool of agents can confine the programs that a model writes, by trying it."""
    found, why = confinement()
    said, because = described(found, why)
    return Check("Python tool", "warn" if found == "none" else "ok", said, because)


def check_extra(name: str) -> Check:
    """Check whether an optional package is installed."""
    purpose, command = _EXTRAS[name]
    try:
        return Check(name, "ok", f"{importlib.metadata.version(name)}, for {purpose}")
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "warn", "not installed", f"only for {purpose}: {command}")


def check_vllm(folder: Path) -> Check:
    """Check for vLLM, which has an environment of its own, `.venv-vllm`."""
    python = folder / ".venv-vllm" / "bin" / "python"
    if python.is_file():
        return Check("vLLM", "ok", f"{python.parent.parent}")
    return Check("vLLM", "warn", "no environment .venv-vllm here", "optional: the embedded engine serves without it")


def _print_table(checks: Sequence[Check]) -> None:
    marks = {"ok": Text("✓", "green"), "warn": Text("!", "yellow"), "fail": Text("✗", "bold red")}
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for check in checks:
        found = Text(check.found)
        if check.advice:
            found.append(f"\n{check.advice}", style="dim")
        table.add_row(marks[check.status], check.name, found)
    console = Console(highlight=False)
    console.print(table)
    failed, warned = (sum(check.status == status for check in checks) for status in ("fail", "warn"))
    if failed:
        console.print(f"\n{failed} of {len(checks)} checks failed; no run will start until they are fixed.", style="bold red")
    else:
        remarks = f", with {warned} remark{'' if warned == 1 else 's'}" if warned else ""
        console.print(f"\nReady{remarks}. Try: offbeat quickstart", style="bold")
