"""What this machine has."""

from pathlib import Path

import psutil


def machine_bytes() -> int:
    """Memory of this machine, or what its container may use."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        limit = ""  # no limit is set, or this is no Linux
    total = psutil.virtual_memory().total
    return min(total, int(limit)) if limit.isdigit() else total
