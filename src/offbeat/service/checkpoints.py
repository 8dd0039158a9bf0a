"""Checkpoints on disk: folders with names of our own and a manifest of checksums, and the rows that make them exist for clients.

A folder is written once. It counts from the moment its row is stored, so a checkpoint is complete or absent; what no row names is removed
at the next start. Its files stay as long as a checkpoint, a model's saved state, a sampler or a load that runs needs them.
"""

import asyncio
import hashlib
import logging
import shutil
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from offbeat.errors import StorageError
from offbeat.service.errors import RequestError, UnknownError
from offbeat.service.ids import CheckpointPath
from offbeat.service.index import CheckpointRows
from offbeat.service.index import path_of as _path
from offbeat.service.limits import Usage
from offbeat.service.store import Store
from offbeat.service.tables import CheckpointRow
from offbeat.service.types import Caller, CheckpointKind
from offbeat.weights.adapters import AdapterManifest

_log = logging.getLogger(__name__)
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class _File:
    """A file's checksum and size."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class _Manifest:
    """What a folder holds; `adapter` is None if engines cannot load it."""

    files: dict[str, _File]
    adapter: AdapterManifest | None = None


class CheckpointError(StorageError):
    """A checkpoint's files are damaged, gone, or cannot be written. Its sentence is for clients, and does not say where they are."""


class Checkpoints:
    """All checkpoints of all owners.

    Attributes:
        users: each says whether something needs a folder; `release` is called when that may have ended.
    """

    def __init__(
        self, rows: Iterable[CheckpointRow], *, store: Store, usage: Usage, folder: Path,
        on_removed: Callable[[AdapterManifest], None] = lambda _: None, clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            rows: those that there were before.
            folder: for all of them.
            on_removed: hears of each adapter whose files are about to go.
        """
        self.users: list[Callable[[str], bool]] = []
        self._rows = CheckpointRows(rows)
        self._store = store
        self._usage = usage
        self._root = folder.resolve()
        self._on_removed = on_removed
        self._clock = clock
        self._held: Counter[str] = Counter()
        self._adding = asyncio.Lock()
        for row in self._rows.values():
            usage.add(row.owner, disk_bytes=row.size_bytes)

    # -- folders -----------------------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def making(self) -> AsyncIterator[str]:
        """The name of a folder that is to be written; it is removed unless something needs it when the body ends."""
        async with self.holding(uuid.uuid4().hex) as folder:
            self._root.mkdir(parents=True, exist_ok=True)
            yield folder

    @asynccontextmanager
    async def holding(self, folder: str) -> AsyncIterator[str]:
        """Keep a folder's files while the body runs."""
        self._held[folder] += 1
        try:
            yield folder
        finally:
            self._held[folder] -= 1
            if not self._held[folder]:
                del self._held[folder]
            await self.release(folder)

    def path(self, folder: str) -> Path:
        """Where it is."""
        return self._root / folder

    async def seal(self, folder: str, *, adapter: AdapterManifest | None = None) -> int:
        """Write the manifest of a complete folder; its size in bytes."""
        return await asyncio.to_thread(_seal, self.path(folder), adapter)

    async def verify(self, folder: str) -> None:
        """Raise CheckpointError unless every file is what was written."""
        await asyncio.to_thread(_verify, self.path(folder))

    async def adapter(self, folder: str) -> AdapterManifest:
        """The adapter in a folder of verified files.

        Raises:
            CheckpointError: they are damaged or gone, or engines cannot load them.
        """
        manifest = await asyncio.to_thread(_verify, self.path(folder))
        if manifest.adapter is None:
            raise CheckpointError(f"the checkpoint folder {folder} holds no adapter for engines")
        return replace(manifest.adapter, folder=str(self.path(folder)))

    async def release(self, folder: str) -> None:
        """Remove a folder's files if nothing needs them any more."""
        if not folder or folder in self._held or self._rows.has_folder(folder):
            return
        if not any(uses(folder) for uses in self.users):
            await self._remove(folder)

    async def clean(self) -> None:
        """Remove what an earlier process has left and no row names."""
        found = await asyncio.to_thread(lambda: {path.name for path in self._root.iterdir()} if self._root.is_dir() else set())
        for name in found - {row.folder for row in self._rows.values()}:
            await self.release(name)

    async def _remove(self, folder: str) -> None:
        path = self.path(folder)
        try:
            manifest = await asyncio.to_thread(_read, path)
            if manifest.adapter is not None:
                self._on_removed(manifest.adapter)
        except CheckpointError:
            pass  # it was never complete
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)  # the next start tries again

    # -- checkpoints -------------------------------------------------------------------------------------------------------------------

    async def add(self, row: CheckpointRow, *, overwrite: bool) -> None:
        """Make a sealed folder exist for clients.

        Raises:
            RequestError: the name is taken, or its owner may not have that much on disk.
        """
        path = _path(row)
        async with self._adding:
            if not overwrite:
                self.check_free(path)
            self._usage.charge(row.owner, disk_bytes=row.size_bytes)
            before = self._rows.get(path)
            self._rows[path] = row
            try:
                await self._store.put(row)
            except StorageError:  # if it is cancelled, the row may well be there
                if self._forget(row) and before is not None:
                    self._rows[path] = before
                raise
        if before is not None:
            self._usage.release(before.owner, disk_bytes=before.size_bytes)
            await self.release(before.folder)

    def check_free(self, path: CheckpointPath) -> None:
        """Raise RequestError if there is a checkpoint of this name."""
        if self._find(path) is not None:
            raise RequestError(f"there is a checkpoint {path} already; choose another name, or ask to overwrite it")

    def readable(self, caller: Caller, path: CheckpointPath) -> CheckpointRow:
        """A checkpoint that is the caller's or public; raises UnknownError if there is none."""
        row = self._find(path)
        if row is None or not (row.public or row.owner == caller.owner):
            raise UnknownError(f"there is no checkpoint {path}, or it is not yours")
        return row

    def owned(self, caller: Caller, path: CheckpointPath) -> CheckpointRow:
        """A checkpoint of the caller's; raises UnknownError if there is none."""
        row = self.readable(caller, path)
        if row.owner != caller.owner:
            raise UnknownError(f"there is no checkpoint {path}, or it is not yours")
        return row

    def select(self, *, owner: str | None = None, run_id: str | None = None) -> list[CheckpointRow]:
        """Those of an owner, of a run, or both; the newest first."""
        return sorted(self._lasting(self._rows.of(owner=owner, run_id=run_id)), key=lambda row: -row.created)

    @property
    def owners(self) -> set[str]:
        """Those who have checkpoints."""
        return self._rows.owners

    def public_runs(self) -> set[str]:
        """Runs with checkpoints that anybody may read."""
        return {row.run_id for row in self._lasting(self._rows.public)}

    def newest(self, run_id: str, *, owner: str) -> dict[CheckpointKind, CheckpointRow]:
        """The last checkpoint of each kind that a run has, of those that an owner may read."""
        found = [row for row in self._lasting(self._rows.of(run_id=run_id)) if row.public or row.owner == owner]
        return {row.kind: row for row in sorted(found, key=lambda row: row.created)}

    def _lasting(self, rows: Iterable[CheckpointRow]) -> list[CheckpointRow]:
        """Those that have not expired."""
        now = self._clock()
        return [row for row in rows if row.expires is None or row.expires > now]

    async def publish(self, row: CheckpointRow, *, public: bool) -> None:
        """Let everybody read a checkpoint, or nobody else."""
        await self._change(replace(row, public=public))

    async def set_ttl(self, row: CheckpointRow, ttl_s: float | None) -> None:
        """Let a checkpoint expire so long from now, or never."""
        await self._change(replace(row, expires=self.expiry(ttl_s)))

    async def _change(self, row: CheckpointRow) -> None:
        self._rows[_path(row)] = row
        await self._store.put(row)

    async def copy(self, row: CheckpointRow, *, run_id: str, owner: str, ttl_s: float | None) -> str:
        """Make a checkpoint exist a second time, of another run and owner; its path."""
        copied = replace(row, run_id=run_id, owner=owner, public=False, created=self._clock(), expires=self.expiry(ttl_s))
        await self.add(copied, overwrite=False)
        return str(_path(copied))

    def expiry(self, ttl_s: float | None) -> float | None:
        """When what is made now expires."""
        return None if ttl_s is None else self._clock() + ttl_s

    async def delete(self, row: CheckpointRow) -> None:
        """Make a checkpoint exist no more; its files go with their last use."""
        if self._forget(row):
            await self._store.delete(row)
            await self.release(row.folder)

    def _forget(self, row: CheckpointRow) -> bool:
        """Whether it was there still; another one may have its name by now."""
        if self._rows.get(_path(row)) is not row:
            return False
        del self._rows[_path(row)]
        self._usage.release(row.owner, disk_bytes=row.size_bytes)
        return True

    async def sweep(self) -> None:
        """Delete what has expired."""
        now = self._clock()
        for row in [row for row in self._rows.values() if row.expires is not None and row.expires <= now]:
            _log.info("the checkpoint %s has expired", _path(row))
            await self.delete(row)

    def files(self, row: CheckpointRow) -> Mapping[str, Path]:
        """A checkpoint's files by their names, without the manifest."""
        folder = self.path(row.folder)
        return {name: folder / name for name in sorted(_read(folder).files)}

    def _find(self, path: CheckpointPath) -> CheckpointRow | None:
        row = self._rows.get(path)
        return None if row is None or (row.expires is not None and row.expires <= self._clock()) else row


def _digest(path: Path) -> _File:
    with path.open("rb") as file:
        return _File(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def _seal(folder: Path, adapter: AdapterManifest | None) -> int:
    try:
        files = {path.name: _digest(path) for path in sorted(folder.iterdir()) if path.is_file()}
        (folder / _MANIFEST).write_bytes(msgspec.json.encode(_Manifest(files, adapter)))
    except OSError as exc:
        raise CheckpointError(f"the checkpoint folder {folder.name} could not be written: {exc.strerror}; free space") from exc
    return sum(file.size_bytes for file in files.values())


def _read(folder: Path) -> _Manifest:
    try:
        manifest = msgspec.convert(_with_canary(msgspec.json.decode((folder / _MANIFEST).read_bytes())), _Manifest)
    except (OSError, msgspec.DecodeError) as exc:
        raise CheckpointError(
            f"the checkpoint folder {folder.name} is gone or damaged: its manifest cannot be read; use another one") from exc
    return manifest


def _with_canary(manifest: Any) -> Any:
    """A manifest in which an earlier Offbeat has written the mean of the canary's log-probabilities alone."""
    adapter = manifest.get("adapter") if isinstance(manifest, dict) else None
    if isinstance(adapter, dict) and "canary_logprob" in adapter:
        adapter.setdefault("canary_logprobs", [adapter["canary_logprob"]])
    return manifest


def _verify(folder: Path) -> _Manifest:
    manifest = _read(folder)
    for name, expected in manifest.files.items():
        try:
            found = _digest(folder / name)
        except OSError as exc:
            raise CheckpointError(f"the checkpoint folder {folder.name} is damaged: {name} cannot be read; use another one") from exc
        if found != expected:
            raise CheckpointError(f"the checkpoint folder {folder.name} is damaged: {name} is not what was written; use another one")
    return manifest
