"""Durable writes: files that survive a power cut. A file's bytes are synced, and so is every folder that has got a new name in it.

Without that, closed files and new names stay in the kernel's memory for up to half a minute. Callers are about to report something as
saved: the checkpoints of runs, and the service's checkpoints, answers and identity. Errors are those of the operating system.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to disk, whichever process wrote them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents durably."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write a file durably and atomically: after a crash it is either complete or absent."""
    with replacing(path, durable=True) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, *, durable: bool = False, concurrent: bool = False) -> Iterator[BinaryIO]:
    """Write a file beside `path`, as ".NAME.part", which takes its place when the body has ended; after an error, what was there stays.

    Args:
        durable: whether the file and its name are to survive a power cut.
        concurrent: whether other processes may write the same file now; the name beside it is then ".NAME.PID.part".
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part" if concurrent else f".{path.name}.part")
    with part.open("wb") as file:
        yield file
    if durable:
        sync(part)
    part.replace(path)
    if durable:
        sync(path.parent)


def remove_parts(folder: Path) -> None:
    """Remove what processes that were killed had begun with `replacing` in a folder, which need not exist."""
    for part in folder.glob(".*.part"):
        part.unlink(missing_ok=True)


def put_in_place(part: Path, folder: Path) -> None:
    """Let a complete folder take the place of another beside it, which may exist; for the new name to be durable, sync their parent."""
    old = folder.with_name(f".{folder.name}.old")
    discard(old)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    discard(old)


def discard(folder: Path) -> None:
    """Remove as much as possible of an unneeded folder; the rest does no harm."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_tree(folder: Path) -> str:
    """Remove an unneeded folder; returns the reason why that is not possible now, "" if it is gone.

    On NFS a folder with a file that a process still has open cannot be removed before that is closed.
    """
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as exc:
        return f"{folder} cannot be removed: {exc.strerror}"
    return ""


def sha256(path: Path) -> str:
    """Return the checksum of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
