"""Resources of this machine or its container."""

from pathlib import Path

import psutil


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
