# ruff: noqa: PTH110, PTH112, PTH113, PTH115, PTH120
"""A disk below one folder that can be full, and that loses at a power cut what was not synced.

`install` replaces functions of `os` and `open` for a process that does nothing else. The files are real. At a cut each file keeps what its
last sync had seen and a random part of what was written since, and names that no sync of their folder has seen may be gone or be as before.
"""

import builtins
import errno
import io
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

_open, _os_open, _write, _fsync, _fdatasync, _rename, _replace = (
    io.open, os.open, os.write, os.fsync, os.fdatasync, os.rename, os.replace)


class TornDisk:
    """What a disk knows of the files below `root`.

    Attributes:
        is_full: whether nothing can be written now.
    """

    def __init__(self, root: Path, is_full: Callable[[], bool]) -> None:
        self._root = str(root)
        self.is_full = is_full
        self._synced: dict[int, bytes] = {}
        """Bytes of files at their last sync, by inode."""
        self._named: dict[str, list[tuple[str, str, bytes | None]]] = {}
        """Renames by folder that no sync of it has seen: old name, new name, and what the new name was before."""
        for path in root.rglob("*"):
            if path.is_file():
                self._synced[path.stat().st_ino] = path.read_bytes()  # an earlier life's files are on disk, or were cut already

    def install(self) -> None:
        """Watch this process."""
        builtins.open = io.open = self._watched_open
        os.open, os.write = self._watched_os_open, self._watched_write
        os.fsync, os.fdatasync = self._seen(_fsync), self._seen(_fdatasync)
        os.rename, os.replace = self._noted(_rename), self._noted(_replace)

    def cut(self, seed: int) -> None:
        """Leave what a power cut leaves. What is kept of a file follows from its name, whatever else was written."""
        self.is_full = lambda: False
        for folder, renames in self._named.items():
            kept = self._rng(seed, folder).randint(0, len(renames))
            for old, new, before in reversed(renames[kept:]):
                _undo(Path(old), Path(new), before)
        for path in sorted(Path(self._root).rglob("*")):
            if not path.is_file():
                continue
            data, synced = path.read_bytes(), self._synced.get(path.stat().st_ino)
            if data == synced:
                continue
            rng = self._rng(seed, str(path))
            if synced is None and rng.random() < 0.5:
                path.unlink()
                continue
            base = synced if synced is not None and data.startswith(synced) else b""
            tail = data[len(base):]
            with _open(path, "wb") as file:
                file.write(base + tail[: round(rng.random() * len(tail))])

    def _rng(self, seed: int, path: str) -> random.Random:
        return random.Random(f"{seed} {os.path.relpath(path, self._root)}")

    def _inside(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self._root)

    def _refuse(self) -> None:
        if self.is_full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _watched_open(self, file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
        if mode[0] not in "wax" or not self._inside(file):
            return _open(file, mode, *args, **named)
        self._refuse()
        is_new = not os.path.exists(file)
        opened = _open(file, mode, *args, **named)
        if is_new:
            self._forget(opened.fileno())
        return opened

    def _watched_os_open(self, path: Any, flags: int, *args: Any, **named: Any) -> int:
        if not flags & os.O_CREAT or not self._inside(path):
            return _os_open(path, flags, *args, **named)
        self._refuse()
        is_new = not os.path.exists(path)
        opened = _os_open(path, flags, *args, **named)
        if is_new:
            self._forget(opened)
        return opened

    def _forget(self, file: int) -> None:
        """Forget a removed file whose inode a new one has, as happens on disks; in memory, inodes are not used again."""
        self._synced.pop(os.fstat(file).st_ino, None)

    def _watched_write(self, file: int, data: Any) -> int:
        if self.is_full() and self._inside(os.readlink(f"/proc/self/fd/{file}")):
            self._refuse()
        return _write(file, data)

    def _seen(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def watched(file: int) -> None:
            path = os.readlink(f"/proc/self/fd/{file}")
            if not self._inside(path):
                real(file)
            elif os.path.isdir(path):
                self._named.pop(path, None)
            else:
                self._refuse()
                with _open(path, "rb") as own:
                    self._synced[os.fstat(file).st_ino] = own.read()

        return watched

    def _noted(self, real: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Any, target: Any, **named: Any) -> None:
            if self._inside(target):
                before = None
                if os.path.isfile(target):
                    with _open(target, "rb") as file:
                        before = file.read()
                self._named.setdefault(os.path.dirname(os.fspath(target)), []).append((os.fspath(source), os.fspath(target), before))
            real(source, target, **named)

        return rename


def _undo(old: Path, new: Path, before: bytes | None) -> None:
    """Bring a name back to what it was before a rename, as far as it is still there."""
    if not new.exists() or old.exists():
        return
    _rename(new, old)
    if before is not None:
        with _open(new, "wb") as file:
            file.write(before)
