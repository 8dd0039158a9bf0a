"""The lock on a run's folder: `lock_run` takes it for the process that runs it, `is_running` tells others whether one does.

The lock is a `flock` on the file `lock`, which the system releases when its process ends, however that happens. `is_running` reads the
system's list of locks and never takes the lock itself, which could refuse a run that is just starting. The list of a system shows its own
processes only, and the file may lie on a shared disk. So the process that holds the lock writes into the file which system it runs on.

A file system without `flock`, as some mounts of Lustre and NFS, has the file `lock.held` instead, which only one process can create. It
says who that is. If that process has died on this machine, the next one takes its place; nothing tells it of a process of another machine.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import psutil

from offbeat.errors import ConfigError, StorageError

_NAME, _HELD = "lock", "lock.held"
_LOCKS = Path("/proc/locks")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NO_FLOCK = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class RunLock(Protocol):
    """A lock that this process holds until it is closed."""

    def close(self) -> None:
        """Release it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /) -> None: ...


def lock_run(run_dir: Path) -> RunLock:
    """Lock a run's folder for this process until the returned lock is closed.

    Raises:
        ConfigError: another process is running this run, or may be on another machine.
        StorageError: the folder cannot be written.
    """
    try:
        lock = (run_dir / _NAME).open("a", encoding="utf-8")
    except OSError as exc:
        raise _unwritable(run_dir, exc) from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _drop_stale(run_dir)  # another machine may have mounted this file system without `flock`
        lock.truncate(0)
        lock.write(_system())
        lock.flush()
    except OSError as exc:
        with suppress(OSError):
            lock.close()
        if isinstance(exc, BlockingIOError):
            raise _in_use(run_dir) from exc
        if exc.errno in _NO_FLOCK:
            return _HeldFile(run_dir)
        raise _unwritable(run_dir, exc) from exc
    except ConfigError:
        lock.close()
        raise
    return lock


def is_running(run_dir: Path, *, locks: Path = _LOCKS) -> bool | None:
    """Whether a process holds the lock of this folder; None if that cannot be told here, as where it ran on another machine.

    `locks` is the system's list of locks, with lines such as "1: FLOCK  ADVISORY  WRITE 15665 fe:00:2154876 0 EOF".
    """
    if (holder := _Holder.read(run_dir / _HELD)) is not None:
        return holder.alive
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


def _drop_stale(run_dir: Path) -> None:
    """Remove `lock.held` of a dead process; raises ConfigError if it lives, that cannot be told, or another has taken its place."""
    if (holder := _Holder.read(run_dir / _HELD)) is None:
        return
    if holder.alive is not False:
        raise _in_use(run_dir, holder)
    stale = run_dir / f".{_HELD}.{secrets.token_hex(4)}"
    with suppress(FileNotFoundError):
        (run_dir / _HELD).rename(stale)
        if (found := _Holder.read(stale)) != holder:
            stale.rename(run_dir / _HELD)
            raise _in_use(run_dir, found)
        stale.unlink()


@dataclass(frozen=True)
class _Holder:
    """The process that has made `lock.held`.

    Attributes:
        system: its machine's boot and its namespace, from `_system`.
        host: its machine's name, for people.
        started_s: when it was started, by the system's clock, because its number may be another process's by now.
    """

    system: str
    host: str
    pid: int
    started_s: float

    @classmethod
    def own(cls) -> "_Holder":
        return cls(_system(), socket.gethostname(), os.getpid(), psutil.Process().create_time())

    @classmethod
    def read(cls, path: Path) -> "_Holder | None":
        """Return who has made the file; None if there is none."""
        try:
            found = json.loads(path.read_bytes())
            return cls(str(found["system"]), str(found["host"]), int(found["pid"]), float(found["started_s"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError):  # it is being written
            return cls("", "a machine that is not known", 0, 0.0)

    @property
    def alive(self) -> bool | None:
        """Whether the process runs; None if it is one of another machine."""
        if not self.system or self.system != _system():
            return None
        try:
            return psutil.Process(self.pid).create_time() == self.started_s
        except psutil.NoSuchProcess:
            return False


class _HeldFile:
    """A lock where the file system has none: a file that only one process can create."""

    def __init__(self, run_dir: Path) -> None:
        """Take it; see `lock_run`."""
        _drop_stale(run_dir)
        try:
            with (run_dir / _HELD).open("x", encoding="utf-8") as file:
                json.dump(asdict(_Holder.own()), file)
            (run_dir / _NAME).write_text(_system(), encoding="utf-8")
            self._folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # the folder may be renamed
        except FileExistsError as exc:
            raise _in_use(run_dir, _Holder.read(run_dir / _HELD)) from exc
        except OSError as exc:
            raise _unwritable(run_dir, exc) from exc

    def close(self) -> None:
        """Release the lock; may be called twice."""
        if self._folder >= 0:
            with suppress(OSError):
                os.unlink(_HELD, dir_fd=self._folder)
            os.close(self._folder)
            self._folder = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _in_use(run_dir: Path, holder: _Holder | None = None) -> ConfigError:
    if holder is None or holder.alive:
        return ConfigError(f"the run {str(run_dir)!r} is being run by another process; wait for it, or set run.name")
    return ConfigError(
        f"the run {str(run_dir)!r} may be being run by process {holder.pid} of {holder.host}, and its file system has no locks that would"
        f" tell; if that has ended, remove {run_dir / _HELD}, else set run.name")


def _system() -> str:
    """Identify the list of locks that this process is in: the machine's boot and the process's namespace; "" if unknown."""
    try:
        return f"{_BOOT.read_text(encoding='ascii').strip()} {Path('/proc/self/ns/pid').readlink()}\n"
    except OSError:
        return ""


def _unwritable(run_dir: Path, exc: OSError) -> StorageError:
    return StorageError(f"cannot write the run folder {run_dir}: {exc.strerror}; free space or set run.dir")
