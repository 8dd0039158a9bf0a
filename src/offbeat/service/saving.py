"""Saves checkpoints, sampler weights and exports of a model, and loads checkpoints: the jobs that have the trainers to themselves.

Called by `training`. Writing has two parts: the trainers write a folder, and the rest (checksums, publication and rows) runs
concurrently with the next turns. A folder that ends up unused is deleted.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from offbeat.runs.adapters import Adapters
from offbeat.service.checkpoints import Checkpoints
from offbeat.service.clock import steady_time
from offbeat.service.encryption import encrypt_files
from offbeat.service.errors import RequestError
from offbeat.service.ids import CheckpointPath
from offbeat.service.models import Model, Models
from offbeat.service.samplers import Samplers
from offbeat.service.sessions import Sessions
from offbeat.service.tables import CheckpointRow
from offbeat.service.types import Caller, CheckpointKind, CheckpointSaved, Outcome, SamplerSaved, WeightsLoaded
from offbeat.service.work import Export, Load, Save, SaveSampler

Finish = Callable[[], Awaitable[Outcome]]
"""Completes what was begun, and returns its outcome."""


@dataclass(frozen=True)
class RestOfWrite:
    """The second part of a write; `keeps_state` says whether it makes the folder the model's saved state.

    `stack` is to be closed afterwards, or if `finish` is never called.
    """

    finish: Finish
    stack: AsyncExitStack
    keeps_state: bool = False


class Saving:
    """Writes and loads folders of models."""

    def __init__(
        self, *, adapters: Adapters, base_model: str, models: Models, sessions: Sessions, checkpoints: Checkpoints, samplers: Samplers,
    ) -> None:
        """`base_model` is the clients' name of the trained model."""
        self._adapters = adapters
        self._base_model = base_model
        self._models = models
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._samplers = samplers

    async def write(self, model: Model, request: Save | SaveSampler | Export) -> RestOfWrite:
        """Have the trainers write a folder; raises RequestError if the name is taken and StorageError if the folder cannot be written."""
        if isinstance(request, Save) and not request.overwrite:
            self._checkpoints.check_free(CheckpointPath(model.id, "training", request.name))
        stack = AsyncExitStack()
        folder = await stack.enter_async_context(self._checkpoints.making())
        try:
            make = self._save(model, request, folder) if isinstance(request, Save) else self._export(model, request, folder)
            return RestOfWrite(await make, stack, keeps_state=isinstance(request, Save))
        except BaseException:
            await stack.aclose()
            raise

    async def _save(self, model: Model, request: Save, folder: str) -> Finish:
        await self._adapters.save(model.adapter, self._checkpoints.path(folder))
        step, num_changes = model.step, model.num_changes

        async def finish_save() -> Outcome:
            size_bytes = await self._checkpoints.seal(folder)
            path = await self._add(model, "training", request, folder, size_bytes=size_bytes, step=step)
            await self._models.keep(model, folder, step=step, num_changes=num_changes)
            return CheckpointSaved(path, "training", size_bytes)

        return finish_save

    async def _export(self, model: Model, request: SaveSampler | Export, folder: str) -> Finish:
        step, version = model.step, model.row.next_version
        await self._models.store(model, next_version=version + 1)  # first, so that a version is used only once even if the server dies now
        adapter = await self._adapters.write(model.adapter, self._checkpoints.path(folder), version=version)

        async def finish_export() -> Outcome:
            assert isinstance(request, Export), "chosen below"
            _name_base(self._checkpoints.path(folder), model.row.base_model)
            if request.recipients:
                await asyncio.to_thread(encrypt_files, self._checkpoints.path(folder), request.recipients)
            size_bytes = await self._checkpoints.seal(folder)
            path = await self._add(model, "external", request, folder, size_bytes=size_bytes, step=step)
            return CheckpointSaved(path, "external", size_bytes)

        async def finish_sampler() -> Outcome:
            assert isinstance(request, SaveSampler), "chosen below"
            size_bytes = await self._checkpoints.seal(folder, adapter=adapter)
            await self._adapters.fleet.publisher.publish(adapter, pinned=True)
            if request.name is not None:
                return SamplerSaved(path=await self._add(
                    model, "sampler", request, folder, size_bytes=size_bytes, step=step, version=version))
            assert request.sampler_seq is not None, "checked when the request was taken"
            if self._sessions.has_ended(model.row.session_id):  # nobody would end the sampler
                raise RequestError(f"the session of the model {model.id} has ended")
            return SamplerSaved(sampling_session_id=await self._samplers.add_ephemeral(
                model.row, seq=request.sampler_seq, version=version, folder=folder, size_bytes=size_bytes))

        return finish_export if isinstance(request, Export) else finish_sampler

    async def _add(
        self, model: Model, kind: CheckpointKind, request: Save | SaveSampler | Export, folder: str, *, size_bytes: int, step: int,
        version: int = 0,
    ) -> str:
        """Make a checkpoint visible to clients under the name that they gave it. Returns its path."""
        assert request.name is not None, "a sampler without a name is none"
        metadata = {} if isinstance(request, Export) else request.metadata
        await self._checkpoints.add(CheckpointRow(
            model.id, kind, request.name, model.row.owner, folder, created=steady_time(), expires=self._checkpoints.expiry(request.ttl_s),
            size_bytes=size_bytes, public=False, metadata=metadata, lora=model.row.lora, base_model=model.row.base_model, step=step,
            version=version), overwrite=not isinstance(request, Save) or request.overwrite)
        return str(CheckpointPath(model.id, kind, request.name))

    async def load(self, model: Model, request: Load) -> Outcome:
        """Continue a model from a checkpoint; raises RequestError if there is none for the owner that fits, StorageError if damaged."""
        try:
            row = self._loadable(model, request.path)
            async with self._checkpoints.holding(row.folder):
                await self._checkpoints.verify(row.folder)
                if not request.creates:
                    await self._models.mark([model])
                await self._adapters.load(model.adapter, self._checkpoints.path(row.folder), optimizer=request.optimizer)
                model.resident, model.has_gradient, model.loss, model.step = True, False, None, row.step
                model.num_changes += 1
                if request.optimizer:
                    await self._models.keep(model, row.folder, step=row.step, num_changes=model.num_changes)
                else:
                    await self._models.save_state(model)
        except BaseException:
            if request.creates:
                await self._models.dismiss(model)
            raise
        return WeightsLoaded(str(request.path), model.id)

    def _loadable(self, model: Model, path: CheckpointPath) -> CheckpointRow:
        row = self._checkpoints.readable(Caller(model.row.owner), path)
        if row.kind != "training":
            raise RequestError(f"{path} holds no state to train on from; load one that save_weights gave")
        if row.base_model != self._base_model:
            raise RequestError(f"{path} was trained on {row.base_model}, where this server has {self._base_model}")
        theirs, ours = ((lora.rank, lora.train_attn, lora.train_mlp) for lora in (row.lora, model.row.lora))
        if theirs != ours:
            raise RequestError(
                f"{path} is an adapter of rank {row.lora.rank} and the model one of rank {model.row.lora.rank}, or they train other "
                "layers; create a model from the checkpoint instead")
        return row


def _name_base(folder: Path, base_model: str) -> None:
    """Write the clients' name of the base model into a PEFT folder, which must not reveal the trainers' path of it."""
    file = folder / "adapter_config.json"
    changed = json.loads(file.read_text(encoding="utf-8")) | {"base_model_name_or_path": base_model}
    file.write_text(json.dumps(changed, indent=2), encoding="utf-8")
