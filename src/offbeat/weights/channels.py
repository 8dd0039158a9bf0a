"""Brings versions out of the trainer: each as a folder (`disk`), or by a broadcast from rank 0 to all engines at once (`collective`).

`runs.assemble` makes the channel, and publishers call it. Torch-free: the broadcast itself is `offbeat.sync.weight_broadcast`.
"""

import re
import secrets
from pathlib import Path
from typing import Protocol

from offbeat.config.weights import WeightsConfig
from offbeat.disk import remove_tree
from offbeat.errors import StorageError
from offbeat.types import NoNotes, Notes, Version
from offbeat.weights.protocol import Manifest

_FOLDER = re.compile(r"v(\d{8})(?:-([0-9a-f]+))?")


def draw_incarnation() -> str:
    """Return six random hexadecimal digits that name this start of a run, so that a resumed run never uses a version's name again."""
    return secrets.token_hex(3)


class VersionWriter(Protocol):
    """The trainer's part: it makes its weights available as a version, and scores the canary under them."""

    @property
    def has_trained(self) -> bool:
        """Whether its weights may be others than those of the model's folder."""
        ...

    async def write_weights(
        self, version: Version, folder: Path, *, canary: tuple[int, ...], num_receivers: int = 0, base: str = "", is_there: bool = False,
    ) -> Manifest:
        """Write the weights into a new folder; with receivers, offer them to that many engines by broadcast instead.

        An offered version's folder is written only if an engine cannot be reached otherwise.

        Args:
            canary: [n] token IDs; the manifest has the log-probabilities [n - 1] of canary[1:].
            base: folder of the version written last: the changes since then may be written instead, or be offered to receivers that have
                that version; the manifest's `base` says so.
            is_there: whether the folder has the weights already, so that nothing is written.
        """
        ...

    def holds(self, version: Version) -> bool:
        """Whether `write_weights` would still write the weights of this version, and not newer ones, if this process alone called it."""
        ...


class Channel:
    """Versions as folders `v00000012-3fa9c1` below one directory; on /dev/shm they never touch a disk.

    A name is never used twice: a run that is resumed publishes numbers again, with other weights, but under a name of its own. With
    receivers a version is offered to them by broadcast, and the folder is written only for engines that this cannot reach. Between versions
    that are written whole, folders may hold the changes since the version before; they stay as long as a folder that builds on them.
    Changes are offered by broadcast, too, to engines that have the version before, no matter how they got it.
    """

    def __init__(
        self, directory: Path, config: WeightsConfig, *, canary: tuple[int, ...], incarnation: str, writer: VersionWriter,
        notes: Notes | None = None, initial: str = "",
    ) -> None:
        """Write versions below `directory`.

        Args:
            config: the channel, versions from a whole one to the next, and the number of versions that stay; engines hold their own copy,
                so nobody needs older ones that all of them have.
            canary: [n] token IDs that prove each version.
            incarnation: last part of the folders' names; see `draw_incarnation`.
            notes: takes a note when a version is written again, or a folder that nobody needs cannot be removed.
            initial: folder of the model if engines have loaded it, too, so that it is a version before the first step; "" if not.
        """
        self._directory = directory
        self._incarnation = incarnation
        self._config = config
        self._canary = canary
        self._writer = writer
        self._notes = notes or NoNotes()
        self._initial = initial
        self._left: set[Path] = set()
        self._chain: list[str] = []
        """Folders that make up the newest version: a whole one, and the changes since. Folders of broadcast versions may not exist."""
        self._bases: dict[str, str] = {}
        self._states: dict[str, _FolderState] = {}
        """State of each folder of the chain when it was written."""
        self._unfinished: Path | None = None
        """A folder that is being written: it does not count among the `keep` newest, which engines may still be reading."""
        self._served: Version | None = None
        """As `prune` was told last. What went on while a version was written may be one too many when the next one is."""

    async def write(self, version: Version, *, num_receivers: int = 0) -> Manifest:
        """Make the trainer's weights available as an immutable version, and return its manifest.

        `num_receivers` is the number of engines that could receive a broadcast now; with 0, or without broadcasts, a folder is written.
        """
        if self._initial and not self._writer.has_trained:
            self._chain = []
            return await self._writer.write_weights(version, Path(self._initial), canary=self._canary, is_there=True)
        num_receivers = num_receivers if self._config.channel == "collective" else 0
        # Receivers of changes have the version before, but a folder of changes is read with the folders that it builds on.
        follows = 0 < len(self._chain) < self._config.longest_chain and (num_receivers > 0 or self._is_intact())
        return await self._make(version, num_receivers=num_receivers, base=self._chain[-1] if follows else "")

    async def rewrite(self, manifest: Manifest) -> Manifest | None:
        """Write a version again, and whole, if its folder, or one that it builds on, is not as it was written, or is the model's.

        Returns the new manifest; None if all is as it was written, or the trainer has other weights by now.
        """
        from_model = bool(self._initial) and manifest.folder == str(Path(self._initial))
        if manifest.broadcast or not self._writer.holds(manifest.version) or (self._is_intact() and not from_model):
            return None
        why = "was not taken by an engine" if from_model else "is not on disk as it was written"
        self._notes.note("rewritten", f"{Path(manifest.folder).name} {why}, and is written again")
        return await self._make(manifest.version)

    def prune(self, served: Version) -> None:
        """Remove the folders of versions, except for the newest `keep`, versions after `served`, and folders that these build on.

        Every engine in service serves the version `served` or a newer one, and may be reading any newer one.
        """
        self._served = served
        versions = {str(folder): version for version, _, folder in self._folders() if folder != self._unfinished}
        folders = list(versions)
        kept = {*folders[-self._config.keep :], *(folder for folder, version in versions.items() if version > served)}
        for folder in reversed(folders):
            if folder in kept:
                kept.add(self._bases.get(folder, ""))
            else:
                self._remove(Path(folder))
        self._bases = {folder: base for folder, base in self._bases.items() if folder in kept}

    def _remove(self, folder: Path) -> bool:
        """Remove a folder and return whether it is gone; if not, it is noted once, and tried again when the next version is served."""
        if (why := remove_tree(folder)) and folder not in self._left:
            self._left.add(folder)
            self._notes.note("not_removed", why)
        return not why

    def _is_intact(self) -> bool:
        """Whether all folders of the newest version were written, and are as they were written."""
        return all((state := _look(Path(folder))) and state == self._states.get(folder) for folder in self._chain)

    async def _make(self, version: Version, *, num_receivers: int = 0, base: str = "") -> Manifest:
        folder = self._directory / f"v{version:08d}-{self._incarnation}"
        # Engines never load these folders again: an earlier start wrote them, or this one, before it failed while writing this number.
        for number, incarnation, left in self._folders():
            if (incarnation != self._incarnation or number >= version) and not self._remove(left) and left == folder:
                raise StorageError(f"{folder} cannot be written, since what is there cannot be removed; remove it, or set weights.dir")
        if self._served is not None:
            self.prune(self._served)
        self._unfinished = folder
        manifest = await self._writer.write_weights(version, folder, canary=self._canary, num_receivers=num_receivers, base=base)
        self._unfinished = None
        self._chain = [*(self._chain if manifest.base else []), str(folder)]
        self._bases.pop(str(folder), None)  # it may have been changes, and is written again
        if manifest.base:
            self._bases[str(folder)] = manifest.base
        self._states = {name: self._states[name] for name in self._chain if name in self._states} | {str(folder): _look(folder)}
        return manifest

    def _folders(self) -> list[tuple[Version, str, Path]]:
        """Return number, incarnation and path of every version on disk, in rising order, such as (12, "3fa9c1", Path(...))."""
        found = [(_FOLDER.fullmatch(path.name), path) for path in self._directory.glob("v*") if path.is_dir()]
        return sorted((int(match[1]), match[2] or "", path) for match, path in found if match)


_FolderState = dict[str, tuple[int, int]]


def _look(folder: Path) -> _FolderState:
    """Return size in bytes and time of change in nanoseconds of every file in a folder, by name."""
    files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
