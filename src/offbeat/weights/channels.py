"""How versions leave the trainer: as a Hugging Face folder each (`disk`), or by a broadcast from its rank 0 (`collective`).

Chosen in `cluster.assemble` and called by the publisher. Torch-free: the broadcast itself is `offbeat.dist.offer`.
"""

import re
import secrets
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from offbeat.types import Version
from offbeat.weights.protocol import Manifest

_FOLDER = re.compile(r"v(\d{8})(?:-([0-9a-f]+))?")


def draw_incarnation() -> str:
    """A name for this start of a run: it tells what this one publishes from what the run has published before it was resumed."""
    return secrets.token_hex(3)


class WriteVersion(Protocol):
    """What the trainer does: make its weights available as a version, and score the canary under them."""

    def __call__(self, version: Version, folder: Path, *, canary: tuple[int, ...], num_receivers: int = 0) -> Awaitable[Manifest]:
        """Write the weights into a new folder; with receivers, offer them to so many engines by broadcast instead.

        An offered version's folder is written only if an engine cannot be reached otherwise.
        """
        ...


class DiskChannel:
    """Versions as folders `v00000012-3fa9c1` below one directory; on /dev/shm they never touch a disk.

    A name is never used twice: a run that is resumed publishes numbers again, with other weights, but under a name of its own.
    """

    def __init__(
        self, directory: Path, *, keep: int, canary: tuple[int, ...], write: WriteVersion, incarnation: str,
        holds: Callable[[Version], bool] = lambda _version: False, on_rewrite: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """
        Args:
            keep: versions that stay; engines hold their own copy, so older ones serve nobody.
            incarnation: the last part of the names.
            holds: whether `write` would still write the weights of this version, and not newer ones.
            on_rewrite: hears, in a sentence, of a version that is written again.
        """
        self._directory = directory
        self._incarnation = incarnation
        self._keep = keep
        self._canary = canary
        self._write = write
        self._holds = holds
        self._on_rewrite = on_rewrite
        self._state = _FolderState()

    async def write(self, version: Version, *, num_receivers: int = 0) -> Manifest:
        """See `Channel.write` and `WriteVersion`."""
        folder = self._directory / f"v{version:08d}-{self._incarnation}"
        for number, incarnation, left in self._folders():
            if incarnation != self._incarnation or number >= version:
                shutil.rmtree(left)
        manifest = await self._write(version, folder, canary=self._canary, num_receivers=num_receivers)
        self._state = _look(folder)
        return manifest

    async def rewrite(self, manifest: Manifest) -> Manifest | None:
        """See `Channel.rewrite`."""
        folder = Path(manifest.folder)
        if manifest.broadcast or not self._holds(manifest.version) or _look(folder) == self._state:
            return None
        self._on_rewrite(f"{folder.name} is not on disk as it was written, and is written again")
        return await self.write(manifest.version)

    def prune(self) -> None:
        """Remove all but the newest versions."""
        for _, _, folder in self._folders()[: -self._keep]:
            shutil.rmtree(folder)

    def _folders(self) -> list[tuple[Version, str, Path]]:
        """Number, incarnation and path of every version that is there."""
        found = [(_FOLDER.fullmatch(path.name), path) for path in self._directory.glob("v*") if path.is_dir()]
        return sorted((int(match[1]), match[2] or "", path) for match, path in found if match)


_FolderState = dict[str, tuple[int, int]]


def _look(folder: Path) -> _FolderState:
    """Size and time of change of every file."""
    files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


class CollectiveChannel:
    """Versions as broadcasts to all engines at once; a disk channel names the folders for what a broadcast cannot reach."""

    def __init__(self, disk: DiskChannel, *, num_receivers: Callable[[], int]) -> None:
        """`num_receivers` tells how many engines are about to be given a version."""
        self._disk = disk
        self._num_receivers = num_receivers

    async def write(self, version: Version) -> Manifest:
        """See `Channel.write`; written to the folder where there is nobody to receive it."""
        return await self._disk.write(version, num_receivers=self._num_receivers())

    async def rewrite(self, manifest: Manifest) -> Manifest | None:
        """See `Channel.rewrite`; only what lies in a folder can be damaged there."""
        return await self._disk.rewrite(manifest)

    def prune(self) -> None:
        """See `Channel.prune`."""
        self._disk.prune()
