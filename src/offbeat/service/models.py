"""Models and their residency: in the trainers, saved in a folder on disk (parked), or fresh, which takes no more than the seed.

A model enters the trainers when it is first needed, and is saved and leaves when its session is silent or its place is needed. Training
since the last save is lost if the trainers or the server die. The model then goes back to its last saved state, and requests that its
client sends before hearing of the loss are not carried out. Only `training` changes models, one turn at a time.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from offbeat.errors import ModelError, StorageError
from offbeat.runs.adapters import Adapters
from offbeat.service.checkpoints import Checkpoints
from offbeat.service.clock import steady_time
from offbeat.service.errors import LostError, UnknownError
from offbeat.service.ids import training_request
from offbeat.service.limits import Usage
from offbeat.service.order import Numbers
from offbeat.service.store import Store
from offbeat.service.tables import ModelRow
from offbeat.service.types import Caller, LoraSpec, ModelInfo


class Loss:
    """A loss of training that the client must hear of before the model continues.

    Attributes:
        told_by: failed requests whose outcome tells the client when it is fetched.
        heard_at: number of the first request sent after the client heard; None until then.
    """

    def __init__(self, message: str) -> None:
        self.message = message
        self.told_by: set[str] = set()
        self.heard_at: int | None = None

    def concerns(self, number: int) -> bool:
        """Whether a request was sent before the client heard of the loss."""
        return self.heard_at is None or number < self.heard_at


class Model:
    """One model.

    Attributes:
        row: the stored row; it changes once the database has committed.
        marked: whether the stored row has, or is about to have, `dirty`: a restart would lose training.
        storing: lock held while the stored row changes.
        numbers: numbers of its requests that have an outcome.
        step: number of optimizer steps so far, also before its checkpoint.
        resident: whether the trainers hold it.
        last_used: counter of turns over all models, as of the last turn that needed this one.
        counted: whether it counts towards its owner's limit of models.
        has_gradient: whether passes have added to a gradient that no step has used yet.
        num_changes: number of changes by steps and loads; its saved state includes `saved_changes` of them.
        loss: None if nothing was lost.
    """

    def __init__(self, row: ModelRow, *, counted: bool) -> None:
        self.row = row
        self.numbers = Numbers(row.last_seq)
        self.storing = asyncio.Lock()
        self.marked = row.dirty
        self.step = row.step
        self.resident = False
        self.last_used = 0
        self.counted = counted
        self.has_gradient = False
        self.num_changes = 0
        self.saved_changes = 0
        self.loss: Loss | None = Loss(_lost(row, "the server was restarted")) if row.dirty else None

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def is_dirty(self) -> bool:
        """Whether a restart now would lose training, or training is lost already and the client has not heard of it."""
        return self.would_lose(self.saved_changes)

    def would_lose(self, saved_changes: int) -> bool:
        """Whether the model would be dirty if its saved state included this many changes."""
        return self.loss is not None or self.has_gradient or self.num_changes > saved_changes

    def check_unused(self, seq: int) -> None:
        """Raise LostError if the request with this number has an outcome that is no longer kept."""
        if seq in self.numbers:
            raise LostError(
                f"request {training_request(self.id, seq)} was carried out, and its answer is not kept any more; a number is used once, so "
                "go on with the next one")

    @property
    def adapter(self) -> str:
        """Name of the model's adapter in the trainers and, with a version, on the engines; unlike an ID it may be a part of paths."""
        return self.row.id.replace(":", ".")

    @property
    def info(self) -> ModelInfo:
        """The model as clients see it."""
        row = self.row
        return ModelInfo(row.id, row.owner, row.base_model, row.lora, row.last_request, row.metadata)


class Models:
    """All models of all owners; `max_resident` is the number that the trainers hold at once, and so the most that one turn may need."""

    def __init__(
        self, rows: Iterable[ModelRow], *, adapters: Adapters, store: Store, usage: Usage, checkpoints: Checkpoints,
        max_resident: int = sys.maxsize,
    ) -> None:
        """Start from the stored rows."""
        self.max_resident = max_resident
        self._num_uses = 0
        self._models = {row.id: Model(row, counted=False) for row in rows}
        self._adapters = adapters
        self._store = store
        self._usage = usage
        self._checkpoints = checkpoints
        checkpoints.users.append(self._uses)

    def __iter__(self) -> Iterator[Model]:
        return iter(tuple(self._models.values()))

    def find(self, caller: Caller, model_id: str) -> Model:
        """Return a model of the caller; raises UnknownError if there is none."""
        model = self._models.get(model_id)
        if model is None or model.row.owner != caller.owner:
            raise UnknownError(f"there is no model {model_id[:120]!r}; create one")
        return model

    def get(self, model_id: str) -> Model | None:
        """Return a model of any owner, or None."""
        return self._models.get(model_id)

    def admit(self, row: ModelRow) -> Model:
        """Create a model in memory only, to be stored or dismissed afterwards.

        Raises RequestError if its owner may have no more models, ModelError if such an adapter cannot be trained here.
        """
        _check_lora(row.lora, self._adapters.limits.max_rank)
        self._usage.charge(row.owner, models=1)
        self._models[row.id] = Model(row, counted=True)
        return self._models[row.id]

    async def dismiss(self, model: Model) -> None:
        """Forget a model that was admitted but could not be created."""
        del self._models[model.id]
        self._uncount(model)
        if model.resident and self._adapters.trainers_alive:
            await self._adapters.remove(model.adapter)
        await self._checkpoints.release_folder(model.row.state_folder)

    async def store(self, model: Model, **changes: Any) -> None:
        """Change the stored row of a model, and then the one in memory; raises StorageError and changes nothing."""
        async with model.storing:
            await self._put(model, **changes)

    async def store_progress(self, model: Model) -> None:
        """Store a model's progress, unless it was already stored along with another request's."""
        async with model.storing:
            if (model.numbers.last, model.is_dirty) != (model.row.last_seq, model.row.dirty):
                await self._put(model, last_request=steady_time(), dirty=model.is_dirty)

    async def _put(self, model: Model, **changes: Any) -> None:
        row = replace(model.row, last_seq=model.numbers.last, **changes)
        model.marked = row.dirty
        try:
            await self._store.put(row)
        except BaseException as exc:
            model.marked = False  # the database's state is unknown, so the row is marked again later
            if not isinstance(exc, StorageError):  # cancelled: the row may have been stored, and then needs its folder
                model.row = row
            raise
        model.row = row

    async def enter(self, model: Model) -> None:
        """Make the trainers hold a model; raises StorageError if its saved state is damaged or gone, OffbeatError if the trainers fail."""
        if model.resident:
            return
        folder = model.row.state_folder
        if folder:
            await self._checkpoints.verify(folder)
            await self._adapters.load(model.adapter, self._checkpoints.path(folder))
        else:
            lora = model.row.lora
            await self._adapters.add(
                model.adapter, rank=lora.rank, alpha=lora.alpha, seed=lora.seed, train_attn=lora.train_attn, train_mlp=lora.train_mlp)
        model.resident = True
        if not model.counted:  # its session was silent and is active again
            model.counted = True
            self._usage.add(model.row.owner, models=1)

    async def make_room(self, model: Model, wanted: Set[Model], *, busy: Set[Model]) -> None:
        """Make sure that the trainers have room for a model, by parking the least recently used ones.

        Parking loses a gradient, so models that have one are parked last, beginning with the owner with the most places.

        Args:
            wanted: models that stay.
            busy: models with requests under way; they would come back soon.

        Raises:
            StorageError: a model to be parked cannot be saved.
        """
        self._num_uses += 1
        model.last_used = self._num_uses
        while not model.resident and len(held := [other for other in self._models.values() if other.resident]) >= self.max_resident:
            places = Counter(other.row.owner for other in held)
            idle = [other for other in held if other not in wanted and not (other.has_gradient and other in busy)]
            if not idle:
                return  # each is in the middle of something, so no more are resident than there are requests under way
            await self.park(min(idle, key=lambda other: (
                other.has_gradient, other in busy, -places[other.row.owner] if other.has_gradient else 0, other.last_used)),
                "its place in the trainers was needed, where it had waited for a step")

    async def mark(self, models: Sequence[Model]) -> None:
        """Store that these models are about to be trained, so that a restart would lose training; returns before the training begins."""
        async with AsyncExitStack() as stack:
            clean = [model for model in models if not model.marked]
            for model in clean:
                await stack.enter_async_context(model.storing)
            rows = [replace(model.row, dirty=True) for model in clean]
            if rows:
                await self._store.put(*rows)
            for model, row in zip(clean, rows, strict=True):
                model.row, model.marked = row, True

    async def keep(self, model: Model, folder: str, *, step: int, num_changes: int) -> None:
        """Make a sealed folder, written after `num_changes` changes, a model's saved state."""
        async with model.storing:
            if model.row.ended or num_changes < model.saved_changes:
                return  # it needs no state any more, or a later one was stored first
            before = model.row.state_folder
            await self._put(model, state_folder=folder, step=step, dirty=model.would_lose(num_changes))
            model.saved_changes = num_changes
        if before != folder:
            await self._checkpoints.release_folder(before)

    async def save_state(self, model: Model) -> None:
        """Write a model's state to a folder that only the model itself uses."""
        async with self._checkpoints.making() as folder:
            await self._adapters.save(model.adapter, self._checkpoints.path(folder))
            await self._checkpoints.seal(folder)
            await self.keep(model, folder, step=model.step, num_changes=model.num_changes)

    async def park(self, model: Model, reason: str) -> None:
        """Save a model and remove it from the trainers until it is needed again; a client that loses a gradient is told the reason."""
        if model.num_changes > model.saved_changes:
            await self.save_state(model)
        await self._adapters.remove(model.adapter)
        model.resident = False
        if model.has_gradient:
            self._fall_back(model, reason)

    async def leave(self, model: Model) -> None:
        """Park a model whose session is silent, and stop counting it towards its owner's limit."""
        if model.resident:
            await self.park(model, "nothing was heard of its session for long")
        self._uncount(model)

    async def delete_state(self, model: Model) -> None:
        """Delete the state of a model whose session has ended for good; the run itself stays known."""
        state, model.loss = model.row.state_folder, None
        if model.resident:
            await self._adapters.remove(model.adapter)
            model.resident = False
        self._uncount(model)
        await self.store(model, ended=True, state_folder="", dirty=False)
        await self._checkpoints.release_folder(state)

    async def forget(self, model: Model) -> None:
        """Forget a run whose session has ended and which has no checkpoints."""
        del self._models[model.id]
        await self._store.delete(model.row)

    def lose_all(self, reason: str) -> None:
        """Note that the trainers have lost every model."""
        for model in self._models.values():
            if model.resident:
                model.resident = False
                if model.is_dirty:
                    self._fall_back(model, reason)

    def _fall_back(self, model: Model, reason: str) -> None:
        model.loss = Loss(_lost(model.row, reason, step=model.step))
        model.step, model.has_gradient = model.row.step, False
        model.num_changes = model.saved_changes

    def _uncount(self, model: Model) -> None:
        if model.counted:
            model.counted = False
            self._usage.release_charge(model.row.owner, models=1)

    def _uses(self, folder: str) -> bool:
        return any(model.row.state_folder == folder for model in self._models.values())


def _lost(row: ModelRow, reason: str, *, step: int = 0) -> str:
    """Return the client's message; `step` is the step that the model had reached, 0 if unknown."""
    where = f"step {row.step}, where it had come to step {step}" if step > row.step else f"step {row.step}"
    return (
        f"the model {row.id} went back to its last checkpoint ({where}) because {reason}; steps and gradients since then are lost, "
        "and so is what was sent before this was fetched; go on from there, or create another model from a checkpoint")


def _check_lora(lora: LoraSpec, max_rank: int) -> None:
    """Raise ModelError for an adapter that cannot be trained here."""
    if not 1 <= lora.rank <= max_rank:
        raise ModelError(f"the rank of an adapter must be 1 to {max_rank} on this server, got {lora.rank}")
    if not (lora.train_attn or lora.train_mlp):
        raise ModelError("an adapter needs train_attn or train_mlp; the output head alone cannot be trained here")
