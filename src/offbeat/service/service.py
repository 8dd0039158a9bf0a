"""The core of the service, called by the HTTP layer: checks the rights of callers, and passes requests on. No wire format, no torch.

Methods that return a request ID return it at once. The work continues in the background, and its outcome is fetched with `retrieve`.
Objects of another owner are treated as if they did not exist.
"""

import asyncio
import logging
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from offbeat.aio import beside
from offbeat.algorithms.adam import AdamParams
from offbeat.errors import StorageError, UserError
from offbeat.fleet.sampling_models import SamplingModel
from offbeat.runs.adapters import Adapters
from offbeat.service.base_models import BaseModels
from offbeat.service.checkpoints import Checkpoints
from offbeat.service.clock import steady_time
from offbeat.service.errors import BadRequestError, LostError, RequestError
from offbeat.service.futures import Future, Futures
from offbeat.service.ids import CheckpointPath, check_name, create_request, model_id
from offbeat.service.library import Library
from offbeat.service.models import Model, Models
from offbeat.service.samplers import Samplers
from offbeat.service.saving import Saving
from offbeat.service.sessions import Sessions
from offbeat.service.store import Store
from offbeat.service.tables import ModelRow
from offbeat.service.training import Training
from offbeat.service.types import (
    Caller,
    EngineStatus,
    Failed,
    LoraSpec,
    ModelCreated,
    ModelInfo,
    ModelStatus,
    OwnerStatus,
    Payload,
    Pending,
    SessionInfo,
    Status,
    TrainingData,
)
from offbeat.service.work import Export, Load, OptimizerStep, Pass, Request, Save, SaveSampler, explain

_log = logging.getLogger(__name__)
_SWEEP_EVERY_S = 10.0


@dataclass(frozen=True)
class ServiceSettings:
    """Settings of the service, as [serve] explains them; `patience_s` is its `gap_patience_s`."""

    max_tokens_per_pass: int = 65_536
    session_timeout_s: float = 600.0
    patience_s: float = 5.0
    orphan_retention_s: float = 7 * 86400.0
    max_resident_models: int = sys.maxsize
    session_retention_s: float = 86400.0
    parked_retention_s: float = 30 * 86400.0
    sampler_timeout_s: float = 3600.0


class ServiceCore:
    """The core of the service; its `library` has runs and checkpoints for REST."""

    def __init__(
        self, adapters: Adapters, base_models: BaseModels, store: Store, futures: Futures, *, folder: Path, settings: ServiceSettings,
        others: Iterable[SamplingModel] = (),
    ) -> None:
        """Assemble the core from the rows of the store; `folder` is the data folder, and `others` are models that are only sampled."""
        rows, usage = store.load(), futures.usage
        self.sessions = Sessions(
            rows.sessions, store=store, usage=usage, timeout_s=settings.session_timeout_s, retention_s=settings.session_retention_s)
        self.checkpoints = Checkpoints(
            rows.checkpoints, store=store, usage=usage, folder=folder / "checkpoints",
            on_removed=lambda adapter: adapters.fleet.adapters.unpin(adapter.name), orphan_retention_s=settings.orphan_retention_s)
        self.samplers = Samplers(
            rows.samplers, engines=adapters.fleet.adapters, base_models=base_models, store=store, usage=usage, sessions=self.sessions,
            checkpoints=self.checkpoints, timeout_s=settings.sampler_timeout_s, retention_s=settings.session_retention_s)
        self.checkpoints.users.append(self.samplers.uses)
        self._models = Models(
            rows.models, adapters=adapters, store=store, usage=usage, checkpoints=self.checkpoints,
            max_resident=settings.max_resident_models)
        self.sessions.users += [
            lambda: self.samplers.session_ids, lambda: {model.row.session_id for model in self._models if not model.row.ended}]
        saving = Saving(
            adapters=adapters, base_model=base_models.name, models=self._models, sessions=self.sessions, checkpoints=self.checkpoints,
            samplers=self.samplers)
        self.library = Library(checkpoints=self.checkpoints, models=self._models, sessions=self.sessions)
        self._training = Training(
            adapters=adapters, base_model=base_models.name, futures=futures, usage=usage, models=self._models, saving=saving,
            max_tokens_per_pass=settings.max_tokens_per_pass, patience_s=settings.patience_s)
        self._adapters = adapters
        self._base_models = base_models
        self._dispatchers = [adapters.fleet.dispatcher, *(model.dispatcher for model in others)]
        self._futures = futures
        self._usage = usage
        self._settings = settings

    async def run(self) -> None:
        """Work until `close` is called or the task is cancelled."""
        await self.checkpoints.clean()
        async with beside(self._sweep()):
            await self._training.run()

    async def close(self) -> None:
        """Accept no more work, finish running work, and save every model; drop waiting work, which its clients learn later."""
        await self._training.close()

    async def _sweep(self) -> None:
        while True:
            try:
                await self.sweep()
            except Exception:  # the service goes on, and the next sweep may succeed
                _log.exception("sweeping failed, and is tried again")
            await asyncio.sleep(_SWEEP_EVERY_S)

    async def sweep(self) -> None:
        """Park models of silent sessions, end models of ended sessions and ones parked for long, and delete expired checkpoints."""
        kept, lately = self.checkpoints.run_ids, steady_time() - self._settings.session_retention_s
        for model in self._models:
            session_id = model.row.session_id
            if model.row.ended:
                if model.id not in kept and model.row.last_request < lately and not self._training.work.has(model):
                    await self._models.forget(model)
                    self._training.forget(model)
            elif self.sessions.has_ended(session_id):
                self._training.dismiss(model, ends=True)
            elif self.sessions.is_silent(session_id) and not self._training.work.has(model):
                if is_left := self.sessions.silence_s(session_id) > self._settings.parked_retention_s:
                    _log.info("the parked model %s has expired", model.id)
                if is_left or model.counted:
                    self._training.dismiss(model, ends=is_left)
        await self.checkpoints.sweep()
        await self.sessions.sweep()

    # -- sessions ----------------------------------------------------------------------------------------------------------------------

    async def create_session(self, caller: Caller, *, metadata: Mapping[str, str], tags: tuple[str, ...], display_name: str) -> str:
        return await self.sessions.create(caller, metadata=metadata, tags=tags, display_name=display_name)

    async def heartbeat(self, caller: Caller, session_id: str) -> None:
        """Record a heartbeat; raises LostError if the session has ended."""
        await self.sessions.heartbeat(caller, session_id)

    async def finish_session(self, caller: Caller, session_id: str, reason: str) -> None:
        """End a session; the client's reason is logged. Its models and unnamed samplers go once their requests are done."""
        if await self.sessions.end_session(caller, session_id):
            _log.info("session %s has ended: %s", session_id, reason)
            for model in self._models:
                if model.row.session_id == session_id:
                    self._training.dismiss(model, ends=True)
            await self.samplers.end_session(session_id)

    def list_sessions(self, caller: Caller, *, limit: int, offset: int) -> list[str]:
        """Return the IDs of the caller's sessions, newest first."""
        return [row.id for row in self.sessions.of(caller)[offset : offset + limit]]

    def session_info(self, caller: Caller, session_id: str) -> SessionInfo:
        row = self.sessions.find(caller, session_id)
        runs = tuple(model.id for model in self._models if model.row.session_id == session_id)
        return SessionInfo(session_id, runs, tuple(self.samplers.ids_of(session_id)), row.metadata, row.display_name)

    # -- models ------------------------------------------------------------------------------------------------------------------------

    async def create_model(
        self, caller: Caller, *, session_id: str, model_seq_id: int, base_model: str, lora: LoraSpec, metadata: Mapping[str, str],
    ) -> str:
        """Begin a fresh model. Returns the ID of the request that creates it."""
        future = self._open_create(caller, session_id, model_seq_id, kind="create_model")
        if future is None:
            return create_request(model_id(session_id, model_seq_id))
        try:
            self._base_models.check_trained(base_model)
            model = self._admit(caller, session_id, model_seq_id, lora, metadata)
        except UserError as exc:
            await self._futures.finish(future, Failed(str(exc), "user"))
            return future.request_id
        try:
            await self._models.store(model)
        except StorageError as exc:
            await self._models.dismiss(model)
            await self._futures.finish(future, explain(exc, name=future.request_id))
        else:
            await self._futures.finish(future, ModelCreated(model.id))
        return future.request_id

    async def create_from_weights(
        self, caller: Caller, *, session_id: str, model_seq_id: int, path: str, optimizer: bool, base_model: str | None,
        metadata: Mapping[str, str],
    ) -> str:
        """Begin a model from a checkpoint, which is the caller's own or public. Returns the ID of the request that creates it."""
        where = CheckpointPath.parse(path)
        future = self._open_create(caller, session_id, model_seq_id, kind="load_weights")
        if future is None:
            return create_request(model_id(session_id, model_seq_id))
        try:
            self._base_models.check_trained(base_model)
            lora = self.checkpoints.readable(caller, where).lora
            model = self._admit(caller, session_id, model_seq_id, lora, metadata)
        except UserError as exc:
            await self._futures.finish(future, Failed(str(exc), "user"))
        else:
            self._training.submit_first(model, Load(where, optimizer, creates=True), future)
        return future.request_id

    def _open_create(self, caller: Caller, session_id: str, seq: int, *, kind: str) -> Future | None:
        """Return the future of a model's creation; None if it was requested before."""
        self.sessions.check(caller, session_id)
        name = model_id(session_id, seq)
        future, is_new = self._futures.open(create_request(name), owner=caller.owner, kind=kind)
        if is_new and self._models.get(name) is not None:  # its answer was forgotten, but the model exists
            self._training.work.answer(future, ModelCreated(name))
        elif is_new:
            return future
        return None

    def _admit(self, caller: Caller, session_id: str, seq: int, lora: LoraSpec, metadata: Mapping[str, str]) -> Model:
        now = steady_time()
        return self._models.admit(ModelRow(
            model_id(session_id, seq), session_id, caller.owner, created=now, last_request=now, base_model=self._base_models.name,
            lora=lora, metadata=metadata))

    def model_info(self, caller: Caller, model_id: str) -> ModelInfo:
        return self._models.find(caller, model_id).info

    # -- training ----------------------------------------------------------------------------------------------------------------------

    async def forward_backward(self, caller: Caller, *, model_id: str, seq_id: int, data: TrainingData, forward_only: bool) -> str:
        """Score datums and, unless `forward_only`, accumulate the gradients of their losses for the next step."""
        kind = "forward" if forward_only else "forward_backward"
        return self._submit(caller, model_id, seq_id, Pass(data, learn=not forward_only), kind=kind)

    async def optim_step(self, caller: Caller, *, model_id: str, seq_id: int, params: AdamParams) -> str:
        return self._submit(caller, model_id, seq_id, OptimizerStep(params), kind="optim_step")

    async def save_weights(
        self, caller: Caller, *, model_id: str, seq_id: int, name: str | None, ttl_s: float | None, overwrite: bool,
        metadata: Mapping[str, str],
    ) -> str:
        """Save weights and optimizer state under a name, by default the number of the request."""
        request = Save(check_name(name or f"{seq_id:06d}"), ttl_s, overwrite, metadata)
        return self._submit(caller, model_id, seq_id, request, kind="save_weights")

    async def load_weights(self, caller: Caller, *, model_id: str, seq_id: int, path: str, optimizer: bool) -> str:
        """Begin with the state of a checkpoint; raises RequestError if it is not the model's first request."""
        where = CheckpointPath.parse(path)
        self._models.find(caller, model_id)
        if seq_id > 1:
            raise RequestError(
                f"load_weights is not permitted as request {seq_id} of a model, only as its first; create another model from the "
                "checkpoint, with create_training_client_from_state or create_training_client_from_state_with_optimizer")
        return self._submit(caller, model_id, seq_id, Load(where, optimizer), kind="load_weights")

    async def save_for_sampler(
        self, caller: Caller, *, model_id: str, seq_id: int, name: str | None, sampling_session_seq_id: int | None,
        ttl_s: float | None, metadata: Mapping[str, str],
    ) -> str:
        """Save weights for sampling, with a path if there is a name, otherwise for the sampler with this number."""
        if name is None and sampling_session_seq_id is None:
            raise BadRequestError("save_weights_for_sampler needs path, a name, or sampling_session_seq_id; give one")
        request = SaveSampler(name and check_name(name), sampling_session_seq_id, ttl_s, metadata)
        return self._submit(caller, model_id, seq_id, request, kind="save_weights_for_sampler")

    async def save_external(
        self, caller: Caller, *, model_id: str, seq_id: int, name: str, ttl_s: float | None, recipients: tuple[str, ...] = (),
    ) -> str:
        """Write weights in PEFT's format for download, encrypted if there are recipients."""
        return self._submit(caller, model_id, seq_id, Export(check_name(name), ttl_s, recipients), kind="save_weights_external")

    def expecting(self, caller: Caller, model_id: str, seq_id: int) -> AbstractContextManager[None]:
        """Let later requests of a model wait for the one with this number, which is submitted within the block or not at all."""
        model = self._own(caller, model_id)
        return nullcontext() if model is None else self._training.expecting(model, seq_id)

    def skip(self, caller: Caller, model_id: str, seq_id: int) -> None:
        """Note that the request with this number was refused, so that no later request waits for it. Never raises."""
        if (model := self._own(caller, model_id)) is not None and seq_id > 0:
            self._training.skip(model, seq_id)

    def _own(self, caller: Caller, model_id: str) -> Model | None:
        model = self._models.get(model_id)
        return model if model is not None and model.row.owner == caller.owner else None

    def _submit(self, caller: Caller, model_id: str, seq_id: int, request: Request, *, kind: str) -> str:
        model = self._models.find(caller, model_id)
        if seq_id < 1:
            raise BadRequestError(f"seq_id must be at least 1, got {seq_id}")
        self.sessions.check(caller, model.row.session_id)
        return self._training.submit(model, seq_id, request, kind=kind)

    async def retrieve(self, caller: Caller, request_id: str, *, timeout_s: float) -> Payload | Pending:
        """Return the result of `Futures.retrieve`, and note that the client has heard of a loss that the answer reports."""
        name, _, seq = request_id.rpartition(":")
        model = self._models.get(name)
        try:
            answer = await self._futures.retrieve(request_id, caller.owner, timeout_s=timeout_s)
        except LostError:
            if model is not None and seq.isdecimal():
                model.check_unused(int(seq))
                self._training.skip(model, int(seq))  # it is unlikely to come again under this number
            raise
        if model is not None and isinstance(answer, Payload):
            self._training.heard(model, request_id)
        return answer

    # -- standing ----------------------------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """Return everything for the status page except the queue of samples."""
        lasting = [model for model in self._models if not model.row.ended]
        samplers = self.samplers.count_by_owner()
        owners = sorted({model.row.owner for model in lasting}.union(self.checkpoints.owners, samplers))
        uses = {owner: self._usage.of(owner) for owner in owners}
        speeds = self._training.speeds.per_s()
        return Status(
            base_model=self._base_models.name, trainers_alive=self._adapters.trainers_alive,
            trained_tokens=self._training.trained_tokens,
            sampled_tokens=sum(dispatcher.generated_tokens for dispatcher in self._dispatchers), training=self._training.work.standing(),
            models=tuple(
                ModelStatus(
                    model.id, model.row.owner, model.row.lora.rank, model.step, model.resident, model.row.last_request,
                    trained_per_s=speeds.get(model.id, 0.0))
                for model in lasting),
            owners=tuple(
                OwnerStatus(
                    owner, use.models, use.queued_tokens, use.disk_bytes, use.queued_bytes, use.sessions,
                    self.checkpoints.count_of(owner), samplers.get(owner, 0))
                for owner, use in uses.items()),
            engines=self._engines(), failures=tuple(self._training.work.failures))

    def _engines(self) -> tuple[EngineStatus, ...]:
        held = self._adapters.fleet.adapters.held
        return tuple(
            EngineStatus(name, state.value, tuple(held.get(name, ())), pool.outstanding[name])
            for pool in (dispatcher.pool for dispatcher in self._dispatchers) for name, state in pool.states.items())
