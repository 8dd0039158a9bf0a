"""Requests to models that were accepted and have not ended: begun by `training`, and each brought to one outcome, which is stored.

    tails     one task for a request's work without the trainers: checksums, publication, storing the outcome; `settle` waits for all
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

from offbeat.errors import StorageError
from offbeat.service.clock import steady_time
from offbeat.service.futures import Future, Futures
from offbeat.service.limits import Usage
from offbeat.service.models import Model, Models
from offbeat.service.types import Failed, FailedRequest, Outcome, Pending, QueueStatus
from offbeat.service.work import Leave, Work

_log = logging.getLogger(__name__)
_NUM_FAILURES = 50


class OpenWork:
    """Requests under way, and their remaining work beside the trainers; `failures` are the latest failed ones."""

    def __init__(self, *, futures: Futures, usage: Usage, models: Models) -> None:
        self.failures: deque[FailedRequest] = deque(maxlen=_NUM_FAILURES)
        self._futures = futures
        self._usage = usage
        self._models = models
        self._open: set[Work] = set()
        self._pending = Pending()
        self._tails: set[asyncio.Task[None]] = set()

    def add(self, work: Work) -> None:
        """Take a request up; until it has an outcome, its pollers get the same `Pending` as all others."""
        self._open.add(work)
        if work.future is not None:
            work.future.pending = self._pending

    def tell(self, pending: Pending) -> None:
        """Set the `Pending` that all pollers get, now and from now on."""
        self._pending = pending
        for work in self._open:
            if work.future is not None:
                work.future.pending = pending

    def has(self, model: Model) -> bool:
        """Whether a model has requests that have not ended."""
        return any(work.model is model for work in self._open)

    def is_leaving(self, model: Model) -> bool:
        """Whether a model is about to leave the trainers."""
        return any(isinstance(work.request, Leave) and work.model is model for work in self._open)

    @property
    def models(self) -> set[Model]:
        return {work.model for work in self._open}

    def standing(self) -> QueueStatus:
        """Return the state of the queue: requests that wait or run."""
        oldest = min((work.since for work in self._open), default=time.monotonic())
        return QueueStatus(len(self._open), sum(work.tokens for work in self._open), round(time.monotonic() - oldest, 2))

    def end_soon(self, work: Work, outcome: Outcome) -> None:
        """Give a request its outcome, unless it already has one."""
        if work.future is None:
            self.drop(work)
        elif not work.has_ended:
            work.has_ended = True
            work.model.numbers.use(work.seq)
            self.spawn(self._end_work(work, work.future, outcome))

    def drop(self, work: Work) -> None:
        """End a request for whose outcome nobody waits."""
        self._open.discard(work)

    def answer(self, future: Future, outcome: Outcome) -> None:
        """End a request that needed no work."""
        self.spawn(self._futures.finish(future, outcome))

    async def _end_work(self, work: Work, future: Future, outcome: Outcome) -> None:
        """Store an outcome along with the model's progress."""
        self._usage.release_charge(work.model.row.owner, **work.charged)
        if isinstance(outcome, Failed):
            self.failures.append(FailedRequest(steady_time(), future.request_id, work.model.row.owner, outcome.message))
        await asyncio.gather(self._store_progress(work), self._futures.finish(future, outcome))
        self._open.discard(work)

    async def _store_progress(self, work: Work) -> None:
        model = work.model
        if self._models.get(model.id) is not model:
            return  # the model was never created
        try:
            await self._models.store_progress(model)
        except StorageError as exc:
            _log.error("%s: its progress could not be stored: %s", model.id, exc)

    def spawn(self, tail: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(tail)
        self._tails.add(task)
        task.add_done_callback(self._tails.discard)
        return task

    async def wait_for_tails(self) -> None:
        """Wait until there are no tails, nor tails of tails."""
        while self._tails:
            await asyncio.wait(tuple(self._tails))

    def cancel(self) -> None:
        for tail in self._tails:
            tail.cancel()
