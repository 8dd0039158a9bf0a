"""How versions leave the trainer: as a Hugging Face folder each (`disk`), or by a broadcast from its rank 0 (`collective`).

Chosen in `cluster.assemble` and called by the publisher. Torch-free: the broadcast itself is `offbeat.dist.offer`.
"""

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from offbeat.types import Version
from offbeat.weights.protocol import Manifest


class WriteVersion(Protocol):
    """What the trainer does: make its weights available as a version, and score the canary under them."""

    def __call__(self, version: Version, folder: Path, *, canary: tuple[int, ...], num_receivers: int = 0) -> Awaitable[Manifest]:
        """Write the weights into a new folder; with receivers, offer them to so many engines by broadcast instead.

        An offered version's folder is written only if an engine cannot be reached otherwise.
        """
        ...


class DiskChannel:
    """Versions as folders `v00000012` below one directory; on /dev/shm they never touch a disk."""

    def __init__(self, directory: Path, *, keep: int, canary: tuple[int, ...], write: WriteVersion) -> None:
        """`keep` versions stay; engines hold their own copy, so older ones serve nobody."""
        self._directory = directory
        self._keep = keep
        self._canary = canary
        self._write = write

    async def write(self, version: Version, *, num_receivers: int = 0) -> Manifest:
        """See `Channel.write` and `WriteVersion`."""
        folder = self._directory / f"v{version:08d}"
        for later in self._folders():
            if later.name >= folder.name:  # left by a run that ended after writing it and before its checkpoint
                shutil.rmtree(later)
        return await self._write(version, folder, canary=self._canary, num_receivers=num_receivers)

    def prune(self) -> None:
        """Remove all but the newest versions."""
        for folder in self._folders()[: -self._keep]:
            shutil.rmtree(folder)

    def _folders(self) -> list[Path]:
        return sorted(self._directory.glob("v????????"))


class CollectiveChannel:
    """Versions as broadcasts to all engines at once; a disk channel names the folders for what a broadcast cannot reach."""

    def __init__(self, disk: DiskChannel, *, num_receivers: Callable[[], int]) -> None:
        """`num_receivers` tells how many engines are about to be given a version."""
        self._disk = disk
        self._num_receivers = num_receivers

    async def write(self, version: Version) -> Manifest:
        """See `Channel.write`; written to the folder where there is nobody to receive it."""
        return await self._disk.write(version, num_receivers=self._num_receivers())

    def prune(self) -> None:
        """See `Channel.prune`."""
        self._disk.prune()
