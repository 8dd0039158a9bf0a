"""Carries out requests to models: each model's requests in order, many models together, and every request to an outcome.

    run       consumes the schedule, turn by turn; produces outcomes; waits for work; woken by `submit`, and when patience runs out

A request that fails has its error as its outcome. If the trainers fail, the requests of that turn fail, the trainers are restarted, and
every other request waits for that. The work on a request without the trainers, up to storing its outcome, is in `open_work`.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress

from offbeat.data.batch import Batch
from offbeat.errors import OffbeatError, RunError, UserError
from offbeat.runs.adapters import Adapters
from offbeat.service.errors import OverLimitError, RequestError
from offbeat.service.futures import Future, Futures
from offbeat.service.ids import training_request
from offbeat.service.limits import Usage
from offbeat.service.models import Loss, Model, Models
from offbeat.service.open_work import OpenWork
from offbeat.service.order import Sequencer
from offbeat.service.saving import RestOfWrite, Saving
from offbeat.service.schedule import Job, JobPart, Lane, Schedule, Turn
from offbeat.service.speeds import Speeds
from offbeat.service.types import Failed, Pending, StepDone
from offbeat.service.work import (
    Export,
    Leave,
    Load,
    Pass,
    Request,
    Save,
    SaveSampler,
    Work,
    category_of,
    datums_of,
    explain,
    params_of,
    pass_done,
    split,
)
from offbeat.user_code.boundary import Caught

_log = logging.getLogger(__name__)
_IDLE_S = 1.0
_DRAIN_S = 10.0
_RESTARTING = Pending("paused_capacity", "the trainers are being started again after a failure")


class Training:
    """All work on models.

    Attributes:
        trained_tokens: number of tokens in passes since the start.
        speeds: trained tokens per second, by model.
        work: requests that have not ended.
    """

    def __init__(
        self, *, adapters: Adapters, base_model: str, futures: Futures, usage: Usage, models: Models, saving: Saving,
        max_tokens_per_pass: int, patience_s: float,
    ) -> None:
        """`max_tokens_per_pass` is the budget of a turn, such as 65536; `base_model` is the clients' name of the trained model."""
        self.trained_tokens = 0
        self.speeds = Speeds()
        self.work = OpenWork(futures=futures, usage=usage, models=models)
        self._adapters = adapters
        self._base_model = base_model
        self._futures = futures
        self._usage = usage
        self._models = models
        self._saving = saving
        self._patience_s = patience_s
        self._pass_tokens = max_tokens_per_pass
        self._schedule: Schedule[Work] = Schedule(max_tokens=max_tokens_per_pass, max_models=models.max_resident)
        self._sequencers: dict[str, Sequencer[Work]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._number = 0
        self._saves: set[asyncio.Task[None]] = set()
        self._woken = asyncio.Event()
        self._closing = False
        self._give_up = math.inf
        self._at_work = asyncio.Lock()

    # -- taking work -------------------------------------------------------------------------------------------------------------------

    def submit(self, model: Model, seq: int, request: Request, *, kind: str) -> str:
        """Accept a request and return its ID; a request sent again is not begun again.

        Raises:
            OverLimitError: its owner has too much under way, or the server is shutting down; the request is not accepted yet.
            RequestError: it costs more than will ever be accepted, or there is no room on disk for its answer.
            LostError: it was carried out before, and its answer is no longer kept.
        """
        owner, request_id = model.row.owner, training_request(model.id, seq)
        if self._futures.find(request_id, owner) is not None:
            return request_id
        model.check_unused(seq)
        sequencer = self._sequencer(model)
        work = Work(self._next_number(), model, seq, request, None, pass_tokens=self._pass_tokens)
        self._charge(work, is_awaited=seq == sequencer.next_seq and sequencer.is_waiting)
        work.future, _ = self._futures.open(request_id, owner=owner, kind=kind)
        self.work.add(work)
        try:
            if isinstance(request, Pass):
                self._adapters.limits.check_batch(request.data.batch, model=self._base_model)
        except UserError as exc:
            sequencer.skip(seq, time.monotonic())
            self.work.end_soon(work, explain(exc, name=work.request_name))
        else:
            sequencer.offer(seq, work, time.monotonic())
        self._advance(model)
        return request_id

    def submit_first(self, model: Model, request: Load, future: Future) -> None:
        """Accept the request with which a model begins."""
        work = Work(self._next_number(), model, 0, request, future)
        work.charged = work.charge
        self._usage.add(model.row.owner, **work.charged)
        self.work.add(work)
        self._add(work)

    def dismiss(self, model: Model, *, ends: bool) -> None:
        """Remove a model from the trainers once its requests are done."""
        if not self.work.is_leaving(model):
            work = Work(self._next_number(), model, 0, Leave(ends), None)
            self.work.add(work)
            self._add(work)

    @contextmanager
    def expecting(self, model: Model, seq: int) -> Iterator[None]:
        """Let requests after this one wait for it, however long the block takes, at whose end it has been submitted or will not be."""
        sequencer = self._sequencer(model)
        sequencer.expect(seq)
        try:
            yield
        finally:
            sequencer.unexpect(seq, time.monotonic())
            self._advance(model)

    def skip(self, model: Model, seq: int) -> None:
        """Note that this number will not come, so that no request waits for it."""
        self._sequencer(model).skip(seq, time.monotonic())
        self._advance(model)

    def forget(self, model: Model) -> None:
        """Drop the state of a model that no longer exists."""
        self._sequencers.pop(model.id, None)

    def heard(self, model: Model, request_id: str) -> None:
        """Note that a client has fetched an outcome, which may have told it of a loss."""
        loss = model.loss
        if loss and loss.heard_at is None and request_id in loss.told_by:
            loss.heard_at = self._number

    def _next_number(self) -> int:
        self._number += 1
        return self._number - 1

    def _charge(self, work: Work, *, is_awaited: bool) -> None:
        """Charge the owner. `is_awaited` says that accepted requests wait for this one, so that refusing it would hold them up."""
        if self._closing:
            raise OverLimitError("this server is going down; the request will be taken when it is back", retry_after_s=5.0)
        try:
            self._usage.charge(work.model.row.owner, **work.charge)
        except OverLimitError:
            if not is_awaited:
                raise
            self._usage.add(work.model.row.owner, **work.charge)
        work.charged = work.charge

    def _sequencer(self, model: Model) -> Sequencer[Work]:
        if model.id not in self._sequencers:
            self._sequencers[model.id] = Sequencer(self._patience_s, model.row.last_seq + 1)
        return self._sequencers[model.id]

    def _advance(self, model: Model) -> None:
        """Schedule a model's next requests as far as their order allows, and set a timer for the rest."""
        sequencer, now = self._sequencer(model), time.monotonic()
        for work in sequencer.ready(now):
            self._add(work)
        if (timer := self._timers.pop(model.id, None)) is not None:
            timer.cancel()
        if (due := sequencer.next_due) is not None:
            self._timers[model.id] = asyncio.get_running_loop().call_later(max(due - now, 0.0) + 0.001, self._advance, model)

    def _add(self, work: Work) -> None:
        self._schedule.add(work.job())
        self._woken.set()

    # -- turns -------------------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled, or after `close` until accepted work is done or takes too long."""
        async with self._at_work:
            try:
                while not self._may_stop():
                    await self._go_on()
            except asyncio.CancelledError:
                self.work.cancel()
                raise

    async def _go_on(self) -> None:
        """Take a turn, or wait a while for work."""
        if not self._adapters.trainers_alive:
            await self._revive()
        turn = self._schedule.next()
        if turn is not None:
            await self._take(turn)
            return
        self._woken.clear()
        with suppress(TimeoutError):  # wakes up regularly, because trainers that die while idle are restarted, too
            await asyncio.wait_for(self._woken.wait(), _IDLE_S)

    def _may_stop(self) -> bool:
        return self._closing and (len(self._schedule) == 0 or time.monotonic() > self._give_up or not self._adapters.trainers_alive)

    async def close(self) -> None:
        """Accept no more work, finish accepted work for a while, and save every model; the rest is dropped, as in a restart."""
        self._closing, self._give_up = True, time.monotonic() + _DRAIN_S
        self._woken.set()
        async with self._at_work:
            await self.work.wait_for_tails()
            if not self._adapters.trainers_alive:
                return
            for model in self._models:
                try:
                    if model.resident and model.num_changes > model.saved_changes:
                        await self._models.save_state(model)
                except OffbeatError as exc:
                    _log.error("%s could not be saved, and stays at its last checkpoint: %s", model.id, exc)

    async def _take(self, turn: Turn[Work]) -> None:
        """Carry out a turn; an error becomes the outcome of its requests."""
        together = [[part] for part in turn.parts] if turn.lane is Lane.ALONE else [turn.parts]
        for its in together:
            parts = [part for part in its if self._may_begin(part.job)]
            with Caught() as caught:  # whatever is raised, the clients wait for outcomes
                wanted = {part.job.item.model for part in parts}
                parts = [part for part in parts if await self._enter(part.job, wanted)]
                if parts:
                    await self._do(turn.lane, parts)
            if (exc := caught.failure) is not None:
                await self._fail_turn(turn.lane, parts, exc)

    async def _fail_turn(self, lane: Lane, parts: list[JobPart[Work]], exc: Exception) -> None:
        models = {part.job.item.model for part in parts}
        if len(models) > 1 and category_of(exc) == "user":  # one model is at fault, and the owners of the others must not see why
            _log.error("a turn of several models failed: %s", exc)
            exc = RunError("a turn of several models failed")
        if not self._adapters.trainers_alive:
            await self._lose_all()
        if lane in (Lane.LEARN, Lane.STEP):
            await self._discard([model for model in models if model.resident])
            for model in models:
                model.has_gradient = False
                model.loss = model.loss or Loss(
                    f"what the model {model.id} had gathered for its next step is lost with a request that failed, and so is what was sent "
                    "before this was fetched; its weights are as its last step left them, so go on from there")
        for job in dict.fromkeys(part.job for part in parts):
            self._fail(job, exc)

    async def _discard(self, models: list[Model]) -> None:
        """Drop the gradients of models; trainers that cannot even do that are restarted."""
        try:
            if models:
                await self._adapters.discard([model.adapter for model in models])
        except OffbeatError as exc:
            _log.error("gradients could not be dropped: %s", exc)
            await self._revive()

    def _may_begin(self, job: Job[Work]) -> bool:
        work, model = job.item, job.item.model
        if isinstance(work.request, Leave):
            return True
        if model.row.ended or self._models.get(model.id) is not model:
            self._fail(job, RequestError(f"the model {model.id} has ended or never began; load a checkpoint in a new session"))
            return False
        if model.loss is not None:
            if model.loss.concerns(work.number):
                self._schedule.drop(job)
                self._tell_loss(work, model.loss)
                self.work.end_soon(work, Failed(model.loss.message, "server"))
                return False
            model.loss = None
        return True

    async def _enter(self, job: Job[Work], wanted: Set[Model]) -> bool:
        """Make sure that the trainers hold this model and all others of the turn; raises only if the trainers themselves failed.

        Any other error, of whatever kind, is the outcome of this model's request alone.
        """
        if isinstance(job.item.request, Leave):
            return True
        with Caught() as caught:
            await self._models.make_room(job.item.model, wanted, busy=self.work.models)
            if not isinstance(job.item.request, Load):
                await self._models.enter(job.item.model)
        if (exc := caught.failure) is None:
            return True
        if not self._adapters.trainers_alive:
            raise exc
        self._fail(job, exc)
        return False

    async def _do(self, lane: Lane, parts: list[JobPart[Work]]) -> None:
        match lane:
            case Lane.LEARN | Lane.SCORE:
                await self._pass(parts, learn=lane is Lane.LEARN)
            case Lane.STEP:
                await self._step([part.job.item for part in parts])
            case Lane.ALONE:
                (part,) = parts
                await self._alone(part.job.item)

    async def _pass(self, parts: list[JobPart[Work]], *, learn: bool) -> None:
        own: dict[Model, list[tuple[JobPart[Work], Batch]]] = {}
        for part in parts:
            own.setdefault(part.job.item.model, []).append((part, datums_of(part)))
        if learn:
            await self._begin_change(list(own))
        scores = await self._adapters.run_pass(
            {model.adapter: Batch.concatenate([datums for _, datums in its]) for model, its in own.items()}, learn=learn)
        for model, its in own.items():
            num_tokens = sum(datums.num_tokens for _, datums in its)
            self.trained_tokens += num_tokens
            self.speeds.note(model.id, num_tokens)
            for (part, _), passed in zip(its, split(scores[model.adapter], [datums for _, datums in its]), strict=True):
                part.job.item.passes.append(passed)
                if part.is_last:
                    self.work.end_soon(part.job.item, pass_done(part.job.item))

    async def _begin_change(self, models: list[Model]) -> None:
        for model in models:
            model.has_gradient = True  # first, so that a row stored meanwhile says that something may be lost
        await self._models.mark(models)

    async def _step(self, works: list[Work]) -> None:
        await self._begin_change([work.model for work in works])
        norms = await self._adapters.optim_step({work.model.adapter: params_of(work) for work in works})
        for work in works:
            model, norm = work.model, norms[work.model.adapter]
            model.has_gradient = False
            if math.isfinite(norm):
                model.step += 1
                model.num_changes += 1
                self.work.end_soon(work, StepDone({"grad_norm": norm}))
            else:
                self.work.end_soon(work, Failed(
                    f"the gradient of {model.id}, or what a step would make of its weights, is not finite; the step was left out", "user"))

    async def _alone(self, work: Work) -> None:
        model = work.model
        match work.request:
            case Save() | SaveSampler() | Export() as request:
                rest = await self._saving.write(model, request)
                tail = self.work.spawn(self._finish(work, rest))
                if rest.keeps_state:
                    self._saves.add(tail)
                    tail.add_done_callback(self._saves.discard)
            case Load() as request:
                await self._settle_saves()  # the checkpoint to load may be one that is just being saved
                self.work.end_soon(work, await self._saving.load(model, request))
            case Leave() as request:
                await (self._models.delete_state(model) if request.ends else self._models.leave(model))
                self.work.drop(work)
            case request:
                raise AssertionError(f"{request} is not alone")

    # -- ends --------------------------------------------------------------------------------------------------------------------------

    async def _finish(self, work: Work, rest: RestOfWrite) -> None:
        """Do the rest of a request concurrently with the next turns."""
        async with rest.stack:
            try:
                outcome = await rest.finish()
            except Exception as exc:  # of whatever kind: the client waits for an outcome
                outcome = explain(exc, name=work.request_name)
        self.work.end_soon(work, outcome)

    def _fail(self, job: Job[Work], exc: Exception) -> None:
        """End a request with an error, and with its model's loss, if there is one by now."""
        work, loss = job.item, job.item.model.loss
        self._schedule.drop(job)
        if loss is not None and category_of(exc) == "server":
            self._tell_loss(work, loss)
        self.work.end_soon(work, explain(exc, name=work.request_name, lost=loss.message if loss is not None else ""))

    def _tell_loss(self, work: Work, loss: Loss) -> None:
        """Note that this request's outcome reports the loss, so that the client that fetches it has heard."""
        if work.future is not None:
            loss.told_by.add(work.future.request_id)

    async def _settle_saves(self) -> None:
        if self._saves:
            await asyncio.wait(tuple(self._saves))

    # -- trainers that fail ------------------------------------------------------------------------------------------------------------

    async def _lose_all(self) -> None:
        await self._settle_saves()  # states that are just being saved are not lost
        self._models.lose_all("the trainers failed")

    async def _revive(self) -> None:
        """Restart the trainers; if that fails, everything that waits for them fails."""
        await self._lose_all()
        _log.warning("the trainers have failed; they are started again")
        self.work.tell(_RESTARTING)
        try:
            with Caught() as caught:
                await self._adapters.restart_trainers()
            if (exc := caught.failure) is not None:  # whatever it is, the loop lives on, and tries again for later jobs
                for job in tuple(self._schedule):
                    self._fail(job, exc)
                await asyncio.sleep(_IDLE_S)
        finally:
            self.work.tell(Pending())
