"""What this machine has."""

from pathlib import Path

import psutil


def machine_bytes() -> int:
    """Memory of this machine, or what its container may use."""
    limit = cgroup("memory.max")
    total = psutil.virtual_memory().total
    return min(total, int(limit)) if limit.isdigit() else total


def cgroup(name: str) -> str:
    """A file of the control group that this process is in, as a container sees it; "" where there is none."""
    try:
        return (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").strip()
    except OSError:
        return ""  # no limit is set, or this is no Linux
