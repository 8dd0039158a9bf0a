"""Folders of this machine that others read on theirs: each is sent once to each machine, and removed there when it is gone here.

Used for weights and adapters that engines load from folders. Folders are not written again while somebody may read them. Torch-free.
"""

import asyncio
from pathlib import Path

from offbeat.errors import StorageError
from offbeat.workers.disks import DiskFolder, FolderFound, place_of, send
from offbeat.workers.worker import Far, Nothing

_State = tuple[tuple[str, int, int], ...]


class Deliveries:
    """State of the folders sent to each disk; for one event loop."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, Path], _State] = {}
        self._turns: dict[tuple[str, Path], asyncio.Lock] = {}

    async def deliver(self, folder: Path, disk: Far, *, timeout_s: float) -> str:
        """Make a folder present on a far disk and return its path there.

        Raises:
            StorageError: the folder is gone, a disk fails, or the folder has not come as it was sent.
            WorkerError, DeathError: the machine is gone. DeadlineError: it took too long.
        """
        key, place = (disk.name, folder), place_of(folder)
        async with self._turns.setdefault(key, asyncio.Lock()):
            state = await asyncio.to_thread(_look, folder)
            if not state:
                raise StorageError(f"{folder} is gone, and cannot be sent to {disk.name}")
            there = self._sent.get(key) == state and (await disk.ask("has", DiskFolder(place), FolderFound, timeout_s=timeout_s)).exists
            if not there:
                await self._remove_gone(disk, timeout_s=timeout_s)
                self._sent.pop(key, None)
                await send(folder, disk, timeout_s=timeout_s)
                self._sent[key] = state
        return disk.path(place)

    async def _remove_gone(self, disk: Far, *, timeout_s: float) -> None:
        """Remove from a disk the folders that this machine has no more, so that nobody needs them there."""
        for key in [key for key in self._sent if key[0] == disk.name and not key[1].is_dir()]:
            if self._sent.pop(key, None) is not None:
                self._turns.pop(key, None)
                await disk.ask("remove", DiskFolder(place_of(key[1])), Nothing, timeout_s=timeout_s)


def _look(folder: Path) -> _State:
    """Return name, size in bytes and time of change in nanoseconds of every file in a folder; () if the folder is gone."""
    try:
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return tuple((path.relative_to(folder).as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in paths)
    except FileNotFoundError:
        return ()
