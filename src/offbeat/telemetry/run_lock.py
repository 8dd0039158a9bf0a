"""The lock on a run's folder: `lock_run` takes it for the process that runs it, `is_running` tells others whether one does.

The lock is a `flock` on the file `lock`, which the system releases when its process ends, however that happens. `is_running` reads the
system's list of locks and never takes the lock itself, which could refuse a run that is just starting. The list of a system shows its own
processes only, and the file may lie on a shared disk. So the process that holds the lock writes into the file which system it runs on.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from offbeat.errors import ConfigError, StorageError

_NAME = "lock"
_LOCKS = Path("/proc/locks")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def lock_run(run_dir: Path) -> IO[str]:
    """Lock a run's folder for this process until the returned file is closed.

    Raises:
        ConfigError: another process is running this run.
        StorageError: the folder cannot be written.
    """
    try:
        lock = (run_dir / _NAME).open("a", encoding="utf-8")
    except OSError as exc:
        raise _unwritable(run_dir, exc) from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        lock.close()
        raise ConfigError(f"the run {str(run_dir)!r} is being run by another process; wait for it, or set run.name") from exc
    try:
        lock.truncate(0)
        lock.write(_system())
        lock.flush()
    except OSError as exc:
        with suppress(OSError):
            lock.close()
        raise _unwritable(run_dir, exc) from exc
    return lock


def is_running(run_dir: Path, *, locks: Path = _LOCKS) -> bool | None:
    """Whether a process holds the lock of this folder; None if that cannot be told here, as where it ran on another machine.

    Args:
        locks: the system's list of locks, of which each line is as "1: FLOCK  ADVISORY  WRITE 15665 fe:00:2154876 0 EOF".
    """
    try:
        with (run_dir / _NAME).open(encoding="utf-8", errors="replace") as lock:
            system, inode = lock.read(len(_system()) + 1), os.fstat(lock.fileno()).st_ino
        held = [line.split() for line in locks.read_text(encoding="ascii", errors="replace").splitlines()]
    except OSError:
        return None
    if not system or system != _system():
        return None
    # The device is not compared, because btrfs and overlays tell another one here than `stat` does.
    return any(words[1:2] == ["FLOCK"] and len(words) > 5 and words[5].rpartition(":")[2] == str(inode) for words in held)


def _system() -> str:
    """Return what all processes whose locks are in one list have in common, the machine's boot and their namespace; "" if it is unknown."""
    try:
        return f"{_BOOT.read_text(encoding='ascii').strip()} {Path('/proc/self/ns/pid').readlink()}\n"
    except OSError:
        return ""


def _unwritable(run_dir: Path, exc: OSError) -> StorageError:
    return StorageError(f"cannot write the run folder {run_dir}: {exc.strerror}; free space or set run.dir")
