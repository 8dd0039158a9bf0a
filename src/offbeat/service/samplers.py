"""Samplers and their weights: the base model's, a checkpoint's, or an unnamed snapshot's.

A sampler never drifts: it is bound to one folder, whose adapter is pinned on the engines from first use to last. When a checkpoint is
deleted, replaced or made private, its samplers end; a snapshot ends with its session, or when it is old and unused. Called by `sampling`,
by the HTTP layer, and by the core, which makes snapshots.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

from offbeat.errors import StorageError
from offbeat.fleet.slots import counted
from offbeat.service.base_models import BaseModels
from offbeat.service.clock import steady_time
from offbeat.service.errors import BadRequestError, RequestError, UnknownError
from offbeat.service.ids import SCHEME, CheckpointPath, sampler_id
from offbeat.service.limits import Usage
from offbeat.service.store import Store
from offbeat.service.tables import CheckpointRow, ModelRow, SamplerRow
from offbeat.service.types import Caller, SamplerInfo
from offbeat.types import Clock
from offbeat.weights.protocol import Manifest

_NAMESPACE = uuid.UUID("6f3a1c52-88d1-4c0e-9b65-0b7d3a5f2e91")
"""Namespace of the IDs that stand for a session where a sampler has none; ownership is checked wherever an ID is used."""


class SamplerEngines(Protocol):
    """The part of `offbeat.fleet.adapters.AdapterCache` that samplers need."""

    def pin(self, manifest: Manifest) -> None: ...

    def unpin(self, name: str) -> None: ...


class SamplerSessions(Protocol):
    """The part of `offbeat.service.sessions.Sessions` that samplers need."""

    def check(self, caller: Caller, session_id: str) -> object: ...

    def is_silent(self, session_id: str) -> bool: ...


class SamplerCheckpoints(Protocol):
    """The part of `offbeat.service.checkpoints.Checkpoints` that samplers need."""

    def readable(self, caller: Caller, path: CheckpointPath) -> CheckpointRow: ...

    async def adapter(self, folder: str) -> Manifest: ...

    async def release_folder(self, folder: str) -> None: ...


class Samplers:
    """All samplers of all owners."""

    def __init__(
        self, rows: Iterable[SamplerRow], *, engines: SamplerEngines, base_models: BaseModels, store: Store, usage: Usage,
        sessions: SamplerSessions, checkpoints: SamplerCheckpoints, timeout_s: float, retention_s: float = 86400.0,
        clock: Clock = steady_time,
    ) -> None:
        """Start from the stored rows.

        Args:
            timeout_s: a snapshot ends after this long without use, unless it is the newest of its model and its session is not silent.
            retention_s: any sampler of a silent session ends after this long without use.
        """
        self._rows = {row.id: row for row in rows}
        self._engines = engines
        self._base_models = base_models
        self._store = store
        self._usage = usage
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._timeout_s = timeout_s
        self._retention_s = retention_s
        self._clock = clock
        self._last_used = dict.fromkeys(self._rows, clock())
        self._pinned: dict[str, str] = {}
        self._pinning: dict[str, asyncio.Lock] = {}
        self._adding: dict[str, asyncio.Lock] = {}
        self._busy: Counter[str] = Counter()
        for row in self._rows.values():
            usage.add(row.owner, disk_bytes=row.size_bytes, samplers=1)

    async def create(self, caller: Caller, *, session_id: str, seq: int, base_model: str | None, model_path: str | None) -> str:
        """Create a sampler of a base model, or of the checkpoint at a path; a repeated request returns the same sampler.

        Raises:
            UnknownError: there is no such session or checkpoint.
            BadRequestError: the checkpoint cannot be sampled, this server has no such base model, or another sampler has the number.
            RequestError: the owner may have no more samplers.
        """
        self._sessions.check(caller, session_id)
        models = self._base_models
        name = models.name if base_model is None else models.resolve(base_model)
        row = SamplerRow(sampler_id(session_id, seq), session_id, caller.owner, name, path=model_path or "", created=self._clock())
        if (known := self._rows.get(row.id)) is not None:
            return _same(known, row).id
        if model_path:
            models.check_trained(base_model)
            row = _of_checkpoint(row, self._checkpoints.readable(caller, CheckpointPath.parse(model_path)))
        elif base_model is None:
            raise BadRequestError("a sampler needs base_model or model_path; give one")
        return await self._add(row)

    async def add_ephemeral(self, model: ModelRow, *, seq: int, version: int, folder: str, size_bytes: int) -> str:
        """Create the sampler of a snapshot: a model's unnamed weights in `folder`, which count towards its owner's use of the disk.

        Raises:
            BadRequestError: the number is taken by another sampler.
            RequestError: the owner may have no more samplers, or not that much on disk.
        """
        row = SamplerRow(
            sampler_id(model.session_id, seq), model.session_id, model.owner, model.base_model, run_id=model.id, version=version,
            folder=folder, size_bytes=size_bytes, created=self._clock())
        return await self._add(row)

    async def of_model(self, caller: Caller, model: str) -> SamplerRow:
        """Return the sampler of a chat's `model`: a sampler's ID, a checkpoint's path, or a base model's name, such as "Qwen/Qwen3-0.6B".

        A sampler of a path or a name belongs to no session. It is created when it is first needed, is bound to the weights that the path
        has now, counts as the caller's, and ends after a long time without use, as samplers of silent sessions do.

        Raises:
            UnknownError: the caller has no such model.
            BadRequestError: the checkpoint cannot be sampled.
            RequestError: the owner may have no more samplers.
        """
        known = self._rows.get(model)
        if known is not None and known.owner == caller.owner:
            return known
        try:
            checkpoint = self._checkpoints.readable(caller, CheckpointPath.parse(model)) if model.startswith(SCHEME) else None
            base_model = self._base_models.resolve(model) if checkpoint is None else checkpoint.base_model
        except (UnknownError, BadRequestError) as exc:
            raise UnknownError(
                f"there is no model {model[:200]!r} here; name the path of weights that you have saved for sampling, the id of a sampler,"
                f" or the base model {self._base_models.name!r}") from exc
        weights = base_model if checkpoint is None else f"{model} {checkpoint.folder}"
        session_id = str(uuid.uuid5(_NAMESPACE, f"{caller.owner} {weights}"))  # so that the same weights are the same sampler
        row = SamplerRow(sampler_id(session_id, 0), session_id, caller.owner, base_model, path="", created=self._clock())
        if checkpoint is not None:
            row = _of_checkpoint(replace(row, path=model), checkpoint)
        return self._rows.get(row.id) or self._rows[await self._add(row)]

    async def _add(self, row: SamplerRow) -> str:
        """Store a sampler and make it visible; concurrent calls for the same number wait."""
        async with self._adding.setdefault(row.id, asyncio.Lock()):
            try:
                if (known := self._rows.get(row.id)) is not None:
                    return _same(known, row).id
                if self._usage.is_full(row.owner, samplers=1):
                    await self._end_rows([
                        other for other in self._rows.values() if other.owner == row.owner and self._is_old(other, self._timeout_s)])
                self._usage.charge(row.owner, disk_bytes=row.size_bytes, samplers=1)
                try:
                    await self._store.put(row)
                except StorageError:
                    self._usage.release_charge(row.owner, disk_bytes=row.size_bytes, samplers=1)
                    raise
                self._rows[row.id], self._last_used[row.id] = row, self._clock()
            finally:
                self._adding.pop(row.id, None)
        return row.id

    def find(self, caller: Caller, sampler: str) -> SamplerRow:
        """Return a sampler of the caller; raises UnknownError if there is no such sampler."""
        row = self._rows.get(sampler)
        if row is None or row.owner != caller.owner:
            raise self._unknown(sampler)
        return row

    def _unknown(self, sampler: str) -> UnknownError:
        return UnknownError(
            f"there is no sampler {sampler[:120]!r}; one that was saved without a name ends with its session, and when it is old and"
            f" has not been used for {self._timeout_s:g} s; any other when its session is silent and it has not been used for"
            f" {self._retention_s:g} s")

    def info(self, caller: Caller, sampler: str) -> SamplerInfo:
        """Return the base model and the path of a sampler; raises as `find`."""
        row = self.find(caller, sampler)
        return SamplerInfo(row.id, row.base_model, row.path or None)

    @property
    def session_ids(self) -> Collection[str]:
        return {row.session_id for row in self._rows.values()}

    def count_by_owner(self) -> Mapping[str, int]:
        return Counter(row.owner for row in self._rows.values())

    def ids_of(self, session_id: str) -> Collection[str]:
        return [row.id for row in self._rows.values() if row.session_id == session_id]

    @asynccontextmanager
    async def using(self, row: SamplerRow) -> AsyncIterator[str]:
        """Yield the name of the sampler's adapter on engines, "" for the base model; the weights stay while the block runs.

        Raises:
            UnknownError: the sampler has ended.
            RequestError: its checkpoint is gone.
            StorageError: its files are damaged.
            BadRequestError: this server no longer has its base model.
        """
        if row.id not in self._rows:
            raise self._unknown(row.id)
        self._last_used[row.id] = self._clock()
        if not row.folder:
            self._base_models.resolve(row.base_model)  # the model may have been on another server
            yield ""
            return
        if row.path and not self._stands(row):
            raise RequestError(f"the checkpoint {row.path} was deleted, replaced or made private, so this sampler has ended")
        try:
            with counted(self._busy, row.folder):
                yield await self._pin(row.folder)
        finally:
            if row.id not in self._rows or (row.path and not self._stands(row)):  # the sampler has ended meanwhile
                await self._let_go(row.folder)

    def uses(self, folder: str) -> bool:
        """Whether a snapshot is in this folder, or a sample is being made from it. `Checkpoints.release` is called when neither is."""
        return folder in self._busy or any(row.folder == folder and not row.path for row in self._rows.values())

    def _stands(self, row: SamplerRow) -> bool:
        """Whether the checkpoint from which a sampler was made still exists unchanged and its owner may read it."""
        try:
            return self._checkpoints.readable(Caller(row.owner), CheckpointPath.parse(row.path)).folder == row.folder
        except RequestError:
            return False

    async def _pin(self, folder: str) -> str:
        async with self._pinning.setdefault(folder, asyncio.Lock()):
            if folder not in self._pinned:
                manifest = await self._checkpoints.adapter(folder)
                self._engines.pin(manifest)
                self._pinned[folder] = manifest.name
            return self._pinned[folder]

    async def end_session(self, session_id: str) -> None:
        """End all snapshots of a session."""
        await self._end_rows([row for row in self._rows.values() if row.session_id == session_id and row.folder and not row.path])

    async def sweep(self) -> None:
        """End old unused samplers, and unpin weights that no sampler may sample any more. To be called about once a minute."""
        snapshots = [row for row in self._rows.values() if row.folder and not row.path]
        newest = {row.run_id: row.id for row in sorted(snapshots, key=lambda row: row.version)}
        since = self._clock() - self._timeout_s
        old = [row for row in snapshots if self._last_used[row.id] < since]
        await self._end_rows([row for row in old if newest[row.run_id] != row.id or self._sessions.is_silent(row.session_id)])
        await self._end_rows([row for row in self._rows.values() if self._is_old(row, self._retention_s)])
        wanted = {row.folder for row in self._rows.values() if row.folder and (not row.path or self._stands(row))}
        for folder in self._pinned.keys() - wanted:
            await self._let_go(folder)

    def _is_old(self, row: SamplerRow, after_s: float) -> bool:
        return self._last_used[row.id] < self._clock() - after_s and self._sessions.is_silent(row.session_id)

    async def _end_rows(self, rows: list[SamplerRow]) -> None:
        if not rows:
            return
        await self._store.delete(*rows)
        ended = [row for row in rows if self._rows.pop(row.id, None) is not None]
        for row in ended:
            del self._last_used[row.id]
            self._usage.release_charge(row.owner, disk_bytes=row.size_bytes, samplers=1)
        for row in ended:
            if row.folder:
                await self._let_go(row.folder)

    async def _let_go(self, folder: str) -> None:
        """Unpin a folder and release its files, unless a sampler may still need it."""
        if folder in self._busy or any(row.folder == folder and (not row.path or self._stands(row)) for row in self._rows.values()):
            return
        if (name := self._pinned.pop(folder, None)) is not None:
            self._engines.unpin(name)
        self._pinning.pop(folder, None)
        await self._checkpoints.release_folder(folder)


def _of_checkpoint(row: SamplerRow, checkpoint: CheckpointRow) -> SamplerRow:
    """Bind a new sampler to the checkpoint at its path; raises BadRequestError if the checkpoint cannot be sampled."""
    if checkpoint.kind != "sampler":
        raise BadRequestError(f"{row.path} holds no weights for sampling; save them with save_weights_for_sampler, and give its path")
    return replace(row, base_model=checkpoint.base_model, run_id=checkpoint.run_id, version=checkpoint.version, folder=checkpoint.folder)


def _same(known: SamplerRow, wanted: SamplerRow) -> SamplerRow:
    """Return the existing sampler if it is the one wanted now; raises BadRequestError if not."""
    of_run = not (known.path and wanted.path) and known.run_id != wanted.run_id  # the run of a path may not be known yet
    if of_run or (known.owner, known.path) != (wanted.owner, wanted.path) or (not known.folder and known.base_model != wanted.base_model):
        raise BadRequestError(f"{known.id} is another sampler already; number them anew")
    return known
