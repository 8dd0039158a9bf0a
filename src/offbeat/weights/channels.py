"""How versions leave the trainer: the `disk` channel, one Hugging Face folder per version."""

import shutil
from collections.abc import Awaitable
from pathlib import Path
from typing import Protocol

from offbeat.types import Version
from offbeat.weights.protocol import Manifest


class WriteVersion(Protocol):
    """What the trainer does: write its weights as a version into a new folder, and score the canary under them."""

    def __call__(self, version: Version, folder: Path, *, canary: tuple[int, ...]) -> Awaitable[Manifest]: ...


class DiskChannel:
    """Versions as folders `v00000012` below one directory; on /dev/shm they never touch a disk."""

    def __init__(self, directory: Path, *, keep: int, canary: tuple[int, ...], write: WriteVersion) -> None:
        """`keep` versions stay; engines hold their own copy, so older ones serve nobody."""
        self._directory = directory
        self._keep = keep
        self._canary = canary
        self._write = write

    async def write(self, version: Version) -> Manifest:
        """See `Channel.write`."""
        folder = self._directory / f"v{version:08d}"
        for later in self._folders():
            if later.name >= folder.name:  # left by a run that ended after writing it and before its checkpoint
                shutil.rmtree(later)
        return await self._write(version, folder, canary=self._canary)

    def prune(self) -> None:
        """Remove all but the newest versions."""
        for folder in self._folders()[: -self._keep]:
            shutil.rmtree(folder)

    def _folders(self) -> list[Path]:
        return sorted(self._directory.glob("v????????"))
