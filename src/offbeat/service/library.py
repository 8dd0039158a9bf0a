"""Lists, changes, copies and downloads of runs and checkpoints, apart from requests to models. Called by the HTTP layer.

Another owner's runs and checkpoints that are not public are treated as if they did not exist.
"""

from collections.abc import Mapping
from pathlib import Path

from offbeat.service.checkpoints import Checkpoints
from offbeat.service.errors import RequestError
from offbeat.service.ids import CheckpointPath, model_id
from offbeat.service.models import Models
from offbeat.service.sessions import Sessions
from offbeat.service.tables import CheckpointRow
from offbeat.service.types import Caller, CheckpointInfo, CheckpointKind, LoraSpec, ModelInfo


class Library:
    """All runs and checkpoints, as callers may see them."""

    def __init__(self, *, checkpoints: Checkpoints, models: Models, sessions: Sessions) -> None:
        self._checkpoints = checkpoints
        self._models = models
        self._sessions = sessions

    def runs(self, caller: Caller, *, limit: int, offset: int, accessible: bool = False) -> tuple[list[ModelInfo], int]:
        """Return a page of the caller's runs, newest first, and their total number; `accessible` adds public runs of other owners."""
        public = self._checkpoints.public_runs() if accessible else ()
        found = [model for model in self._models if model.row.owner == caller.owner or model.id in public]
        found.sort(key=lambda model: -model.row.created)
        return [model.info for model in found[offset : offset + limit]], len(found)

    def run_info(self, caller: Caller, run_id: str, *, accessible: bool = False) -> ModelInfo:
        """Return a run of the caller, or one with a public checkpoint if `accessible`."""
        model = self._models.get(run_id)
        if accessible and model is not None and any(row.public for row in self._checkpoints.select(run_id=run_id)):
            return model.info
        return self._models.find(caller, run_id).info

    def newest_checkpoints(self, caller: Caller, run_id: str) -> dict[CheckpointKind, CheckpointInfo]:
        """Return the latest checkpoint of each kind in a run that the caller may read."""
        newest = self._checkpoints.newest(run_id, owner=caller.owner)
        return {kind: _info(row) for kind, row in newest.items()}

    def list_checkpoints(
        self, caller: Caller, *, run_id: str | None = None, limit: int | None = None, offset: int = 0, exports: bool = True,
    ) -> tuple[list[CheckpointInfo], int]:
        """Return a page of the caller's checkpoints, of one run or of all, newest first, and their total number.

        Of another owner's run, only the public ones are listed; without `exports`, for clients that do not know them, exports are left out.
        Raises UnknownError if there is no such run.
        """
        rows = self._checkpoints.select(owner=caller.owner if run_id is None else None, run_id=run_id)
        rows = [row for row in rows if row.public or row.owner == caller.owner]
        if run_id is not None and not rows:
            self._models.find(caller, run_id)
        rows = [row for row in rows if exports or row.kind != "external"]
        return [_info(row) for row in rows[offset:][:limit]], len(rows)

    async def delete_checkpoint(self, caller: Caller, path: str) -> None:
        await self._checkpoints.delete(self._owned(caller, path))

    async def set_public(self, caller: Caller, path: str, *, public: bool) -> None:
        await self._checkpoints.set_public(self._owned(caller, path), public=public)

    async def set_ttl(self, caller: Caller, path: str, ttl_s: float | None) -> None:
        await self._checkpoints.set_ttl(self._owned(caller, path), ttl_s)

    def weights_info(self, caller: Caller, path: str) -> tuple[str, LoraSpec]:
        """Return the name of a checkpoint's base model, and its adapter."""
        row = self._checkpoints.readable(caller, CheckpointPath.parse(path))
        return row.base_model, row.lora

    def external_folder(self, caller: Caller, path: str) -> str:
        """Return the folder of an export; it changes if the export is replaced."""
        return self._readable(caller, path, "external").folder

    def external_files(self, caller: Caller, path: str) -> Mapping[str, Path]:
        """Return the paths of an export's files by name. May be called from any thread."""
        return self._checkpoints.files(self._readable(caller, path, "external"))

    def adapter_files(self, caller: Caller, path: str) -> tuple[Mapping[str, Path], str]:
        """Return the paths of the files of a sampler checkpoint or an export by name, and the clients' name of its base model."""
        row = self._checkpoints.readable(caller, CheckpointPath.parse(path))
        if row.kind == "training":
            raise RequestError(
                f"{path} holds a state to train on from, which cannot be downloaded as an adapter; save one with save_weights_for_sampler")
        return self._checkpoints.files(row), row.base_model

    async def copy_weights(self, caller: Caller, *, path: str, session_id: str, model_seq_id: int, ttl_s: float | None) -> str:
        """Copy a checkpoint to another run of the caller. Returns its path."""
        self._sessions.check(caller, session_id)
        return await self._checkpoints.copy(
            self._checkpoints.readable(caller, CheckpointPath.parse(path)), run_id=model_id(session_id, model_seq_id), owner=caller.owner,
            ttl_s=ttl_s)

    def _owned(self, caller: Caller, path: str) -> CheckpointRow:
        return self._checkpoints.owned(caller, CheckpointPath.parse(path))

    def _readable(self, caller: Caller, path: str, kind: CheckpointKind) -> CheckpointRow:
        row = self._checkpoints.readable(caller, CheckpointPath.parse(path))
        if row.kind != kind:
            raise RequestError(f"{path} is a {row.kind} checkpoint, where one that is {kind} is needed")
        return row


def _info(row: CheckpointRow) -> CheckpointInfo:
    return CheckpointInfo(row.run_id, row.kind, row.name, row.created, row.size_bytes, row.public, row.expires, row.metadata)
