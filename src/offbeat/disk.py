"""What it takes for files to survive a power cut: their bytes are synced, and so is each folder that has a new name in it.

A file that was closed, and a name that was made, are in the memory of the kernel for half a minute. Used where something is about to be
called kept: by the checkpoints of runs, and by the service's checkpoints, answers and identity. Errors are those of the operating system.
"""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Bring a file's bytes to the disk, or a folder's names, whoever wrote them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, for good."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, for good."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    sync(part)
    part.replace(path)
    sync(path.parent)
