"""Checkpoints on disk: folders with random names and a manifest of checksums, and the database rows that make them visible to clients.

A folder is written once and synced to disk before its row is stored, and counts from then on. So a checkpoint is complete or absent, even
after a power cut. Folders that no row names are set aside at the next start. Files stay as long as a checkpoint, a model's saved state, a
sampler, or a running copy or load needs them. Rows in memory change one after another, each after its database commit.
"""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from offbeat.disk import discard, make_folder
from offbeat.errors import StorageError
from offbeat.fleet.slots import counted
from offbeat.service.clock import steady_time
from offbeat.service.errors import RequestError, UnknownError
from offbeat.service.ids import CheckpointPath
from offbeat.service.index import CheckpointRows
from offbeat.service.index import path_of as _path
from offbeat.service.limits import Usage
from offbeat.service.manifest import CheckpointError, read_manifest, seal, verify
from offbeat.service.orphans import FOLDER, Orphans
from offbeat.service.store import Store
from offbeat.service.tables import CheckpointRow
from offbeat.service.types import Caller, CheckpointKind
from offbeat.types import Clock
from offbeat.weights.protocol import Manifest

OnRemoved = Callable[[Manifest], None]
"""Called with the adapter of a checkpoint whose files are about to be deleted."""

_log = logging.getLogger(__name__)


class Checkpoints:
    """All checkpoints of all owners; `users` tell whether they need a folder, which is released when a need may have ended."""

    def __init__(
        self, rows: Iterable[CheckpointRow], *, store: Store, usage: Usage, folder: Path, on_removed: OnRemoved = lambda _: None,
        orphan_retention_s: float = 7 * 86400.0, clock: Clock = steady_time,
    ) -> None:
        """Start from the stored rows, and charge their owners for the disk space.

        `folder` is the parent of all checkpoint folders. For `orphan_retention_s` see `Orphans`.
        """
        self.users: list[Callable[[str], bool]] = []
        self._rows = CheckpointRows(rows)
        self._store = store
        self._usage = usage
        self._root = folder.resolve()
        self._on_removed = on_removed
        self._clock = clock
        self._held: Counter[str] = Counter()
        self._changing = asyncio.Lock()
        self._orphans = Orphans(self._root, retention_s=orphan_retention_s, clock=clock)
        for row in self._rows.values():
            usage.add(row.owner, disk_bytes=row.size_bytes)

    @asynccontextmanager
    async def making(self) -> AsyncIterator[str]:
        """Yield the name of a new folder to write; at the end of the body it is deleted unless one of `users` needs it."""
        async with self.holding(uuid.uuid4().hex) as folder:
            make_folder(self._root)
            yield folder

    @asynccontextmanager
    async def holding(self, folder: str) -> AsyncIterator[str]:
        """Keep a folder's files while the body runs."""
        try:
            with counted(self._held, folder):
                yield folder
        finally:
            await self.release_folder(folder)

    def path(self, folder: str) -> Path:
        return self._root / folder

    async def seal(self, folder: str, *, adapter: Manifest | None = None) -> int:
        """Write the manifest of a complete folder and sync everything to disk. Returns its size in bytes."""
        return await asyncio.to_thread(seal, self.path(folder), adapter)

    async def verify(self, folder: str) -> None:
        """Raise CheckpointError unless every file has the contents that were written."""
        await asyncio.to_thread(verify, self.path(folder))

    async def adapter(self, folder: str) -> Manifest:
        """Verify a folder's files and return its adapter; raises CheckpointError if files are damaged, or engines cannot load it."""
        manifest = await asyncio.to_thread(verify, self.path(folder))
        if manifest.adapter is None:
            raise CheckpointError(f"the checkpoint folder {folder} holds no adapter for engines")
        return replace(manifest.adapter, folder=str(self.path(folder)))

    async def release_folder(self, folder: str) -> None:
        """Delete a folder's files, unless one of `users` needs them."""
        if folder and not self._is_needed(folder):
            await self._remove(folder)

    def _is_needed(self, folder: str) -> bool:
        return folder in self._held or self._rows.has_folder(folder) or any(uses(folder) for uses in self.users)

    async def clean(self) -> None:
        """Set aside folders that no row names, left by a killed server or another database; restore folders that a row names again."""
        found, aside = await asyncio.to_thread(lambda: (_names(self._root) - {FOLDER}, self._orphans.names()))
        for name in aside:
            if self._is_needed(name):
                await asyncio.to_thread(self._orphans.bring_back, name)
        orphans = [name for name in found - {row.folder for row in self._rows.values()} if not self._is_needed(name)]
        if orphans:
            await asyncio.to_thread(self._orphans.put_aside, orphans)

    async def _remove(self, folder: str) -> None:
        path = self.path(folder)
        try:
            manifest = await asyncio.to_thread(read_manifest, path)
            if manifest.adapter is not None:
                self._on_removed(manifest.adapter)
        except CheckpointError:
            pass  # the folder was never complete
        await asyncio.to_thread(discard, path)  # anything left over is an orphan at the next start

    async def add(self, row: CheckpointRow, *, overwrite: bool) -> None:
        """Make a sealed folder visible to clients; raises RequestError if its name is taken, or its owner's disk limit exceeded."""
        path = _path(row)
        async with self._changing:
            if not overwrite:
                self.check_free(path)
            self._usage.charge(row.owner, disk_bytes=row.size_bytes)
            try:
                await self._store.put(row)
            except StorageError:
                self._usage.release_charge(row.owner, disk_bytes=row.size_bytes)
                raise
            except asyncio.CancelledError:  # the row may have been stored, and then needs its files
                self._rows[path] = row
                raise
            before = self._rows.get(path)
            self._rows[path] = row
        if before is not None:
            self._usage.release_charge(before.owner, disk_bytes=before.size_bytes)
            await self.release_folder(before.folder)

    def check_free(self, path: CheckpointPath) -> None:
        """Raise RequestError if a checkpoint of this name exists."""
        if self._find(path) is not None:
            raise RequestError(f"there is a checkpoint {path} already; choose another name, or ask to overwrite it")

    def readable(self, caller: Caller, path: CheckpointPath) -> CheckpointRow:
        """Return a checkpoint that is public or belongs to the caller; raises UnknownError if there is none."""
        row = self._find(path)
        if row is None or not (row.public or row.owner == caller.owner):
            raise _unknown(path)
        return row

    def owned(self, caller: Caller, path: CheckpointPath) -> CheckpointRow:
        """Return a checkpoint that belongs to the caller; raises UnknownError if there is none."""
        row = self.readable(caller, path)
        if row.owner != caller.owner:
            raise _unknown(path)
        return row

    def select(self, *, owner: str | None = None, run_id: str | None = None) -> list[CheckpointRow]:
        """Return the checkpoints of an owner, of a run, or of an owner within a run, newest first."""
        return sorted(self._lasting(self._rows.of(owner=owner, run_id=run_id)), key=lambda row: -row.created)

    @property
    def owners(self) -> set[str]:
        return self._rows.owners

    def count_of(self, owner: str) -> int:
        """Return the number of an owner's checkpoints, including expired ones that are not yet deleted."""
        return self._rows.count_of(owner)

    def public_runs(self) -> set[str]:
        """Return the IDs of runs with public checkpoints."""
        return {row.run_id for row in self._lasting(self._rows.public)}

    def newest(self, run_id: str, *, owner: str) -> dict[CheckpointKind, CheckpointRow]:
        """Return the latest checkpoint of each kind in a run that the owner may read."""
        found = [row for row in self._lasting(self._rows.of(run_id=run_id)) if row.public or row.owner == owner]
        return {row.kind: row for row in sorted(found, key=lambda row: row.created)}

    def _lasting(self, rows: Iterable[CheckpointRow]) -> list[CheckpointRow]:
        """Return the rows that have not expired."""
        now = self._clock()
        return [row for row in rows if row.expires is None or row.expires > now]

    @property
    def run_ids(self) -> Set[str]:
        return {path.run_id for path in self._rows}

    async def set_public(self, row: CheckpointRow, *, public: bool) -> None:
        """Make a checkpoint public, or private again; raises UnknownError if it no longer exists."""
        await self._change(row, public=public)

    async def set_ttl(self, row: CheckpointRow, ttl_s: float | None) -> None:
        """Let a checkpoint expire `ttl_s` seconds from now, or never for None; raises UnknownError if it no longer exists."""
        await self._change(row, expires=self.expiry(ttl_s))

    async def _change(self, row: CheckpointRow, **changes: Any) -> None:
        async with self._changing:
            now = self._rows.get(_path(row))
            if now is None or now.folder != row.folder:
                raise _unknown(_path(row))
            changed = replace(now, **changes)
            await self._store.put(changed)
            self._rows[_path(row)] = changed

    async def copy(self, row: CheckpointRow, *, run_id: str, owner: str, ttl_s: float | None) -> str:
        """Add a checkpoint with the same files to another run and owner. Returns its path."""
        copied = replace(row, run_id=run_id, owner=owner, public=False, created=self._clock(), expires=self.expiry(ttl_s))
        async with self.holding(row.folder):  # the original may be deleted meanwhile
            await self.add(copied, overwrite=False)
        return str(_path(copied))

    def expiry(self, ttl_s: float | None) -> float | None:
        """Return the expiry of a checkpoint that is created now, in seconds since the epoch; None for never."""
        return None if ttl_s is None else self._clock() + ttl_s

    async def delete(self, row: CheckpointRow) -> None:
        """Delete a checkpoint if it exists, its files after their last use; raises StorageError, and it stays, if the database fails."""
        path = _path(row)
        async with self._changing:
            now = self._rows.get(path)
            if now is None or now.folder != row.folder:
                return  # by now another checkpoint may have its name
            await self._store.delete(now)
            del self._rows[path]
            self._usage.release_charge(now.owner, disk_bytes=now.size_bytes)
        await self.release_folder(row.folder)

    async def sweep(self) -> None:
        """Delete expired checkpoints and old orphans."""
        now = self._clock()
        for row in [row for row in self._rows.values() if row.expires is not None and row.expires <= now]:
            _log.info("the checkpoint %s has expired", _path(row))
            await self.delete(row)
        await asyncio.to_thread(self._orphans.sweep)

    def files(self, row: CheckpointRow) -> Mapping[str, Path]:
        """Return the paths of a checkpoint's files by name, without the manifest."""
        folder = self.path(row.folder)
        return {name: folder / name for name in sorted(read_manifest(folder).files)}

    def _find(self, path: CheckpointPath) -> CheckpointRow | None:
        row = self._rows.get(path)
        return None if row is None or (row.expires is not None and row.expires <= self._clock()) else row


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _unknown(path: CheckpointPath) -> UnknownError:
    return UnknownError(f"there is no checkpoint {path}, or it is not yours")
