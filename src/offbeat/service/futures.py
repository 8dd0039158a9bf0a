"""Requests that end later: each is opened under its ID (see `ids`), ended exactly once, and awaited by long polls.

A request that has not ended exists only in memory: if the server dies, the request is lost, and its client is told so and may send it
again. A request that has ended is on disk before anybody hears of it, and can be found, even after a restart, until its retention has
passed. An answer for its own connection alone, such as a chat's, is not kept. The core opens and ends requests, and the HTTP layer
retrieves them, all on one event loop. Encoding, files and commits are the work of the store's thread.
"""

import asyncio
import logging
from collections.abc import Callable

from offbeat.errors import StorageError
from offbeat.service.clock import steady_time
from offbeat.service.cost import ANSWER_ROW_BYTES
from offbeat.service.errors import BadRequestError, LostError, UnknownError
from offbeat.service.ids import session_of
from offbeat.service.limits import Usage
from offbeat.service.results import Location, Results
from offbeat.service.store import Store
from offbeat.service.tables import FutureRow
from offbeat.service.types import Failed, Outcome, Payload, Pending
from offbeat.types import Clock

OwnerOf = Callable[[str], str | None]
"""Returns the owner of a session; None if there is none."""

Encode = Callable[[Outcome], Payload]
"""Writes an outcome for clients."""

_log = logging.getLogger(__name__)
_KEPT_AFTER_FETCH_S = 600


class Future:
    """A request that is under way or has ended.

    Attributes:
        kind: kind of the request, to show to people.
        kept: whether its answer is on disk before anybody hears of it; otherwise only the holder of the future gets it.
        pending: answer to pollers until the request ends; the code that carries it out may set it.
        outcome: outcome of the request, once it has ended; None if there is only its answer on disk.
    """

    def __init__(
        self, request_id: str, *, owner: str, kind: str, created: float, answer: asyncio.Future[Payload] | None, kept: bool = True,
    ) -> None:
        """`answer` is None if the answer is on disk."""
        self.request_id = request_id
        self.owner = owner
        self.kind = kind
        self.created = created
        self.kept = kept
        self.pending = Pending()
        self.outcome: Outcome | None = None
        self._answer = answer
        self._ending = False

    @property
    def done(self) -> bool:
        return self._answer is None or self._answer.done()

    def claim_end(self) -> bool:
        """Return True for the first caller, which has to end the request, and False for all others."""
        first, self._ending = not self._ending and not self.done, True
        return first

    def set_answer(self, answer: Payload, outcome: Outcome) -> None:
        """Give the answer, which encodes the outcome, to everyone who waits."""
        assert self._answer is not None and not self._answer.done(), f"request {self.request_id} ended twice"
        self.outcome = outcome
        self._answer.set_result(answer)

    async def wait(self, timeout_s: float) -> Payload | Pending:
        """Return the answer if it arrives within `timeout_s` seconds, otherwise the request's `pending`."""
        assert self._answer is not None, f"the answer of request {self.request_id} is on disk"
        await asyncio.wait([self._answer], timeout=timeout_s)
        return self._answer.result() if self._answer.done() else self.pending

    async def ended(self) -> Outcome:
        """Wait for the end of a request that is under way, without a deadline, and return its outcome."""
        assert self._answer is not None, f"the answer of request {self.request_id} is on disk"
        await asyncio.wait([self._answer])
        assert self.outcome is not None, "a request that has ended came to something"
        return self.outcome


class Futures:
    """All requests of all owners."""

    def __init__(
        self, store: Store, results: Results, *, encode: Encode, owner_of: OwnerOf,
        usage: Usage, retention_s: float = 3600.0, clock: Clock = steady_time,
    ) -> None:
        """Read the IDs of requests that have ended before. Answers count towards their owners' disk use until they are swept.

        Args:
            encode: called on the store's thread.
            retention_s: time for which an answer is kept after its request ended; it is also kept for ten minutes after each fetch.

        Raises:
            StorageError: the database cannot be read.
        """
        self._store = store
        self._results = results
        self._encode = encode
        self._owner_of = owner_of
        self.usage = usage
        self._retention_s = retention_s
        self._clock = clock
        self._open: dict[str, Future] = {}
        # Hashes of IDs take little memory, and spare a database query for most requests, which are new.
        self._on_disk = {hash(request_id) for request_id in store.future_ids()}
        self._fetched: dict[str, float] = {}
        for owner, (num_answers, num_bytes) in store.answer_sizes().items():
            usage.add(owner, disk_bytes=num_bytes + num_answers * ANSWER_ROW_BYTES)

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._open)

    def open(self, request_id: str, *, owner: str, kind: str, kept: bool = True) -> tuple[Future, bool]:
        """Return the future of a request, and whether it is new, in which case the caller must carry it out.

        Raises:
            UnknownError: the ID belongs to another owner's request.
            StorageError: the database cannot be read.
        """
        if (found := self._look(request_id)) is not None:
            if found.owner != owner:
                raise _unknown(request_id)
            return found, False
        answer = asyncio.get_running_loop().create_future()
        future = self._open[request_id] = Future(request_id, owner=owner, kind=kind, created=self._clock(), answer=answer, kept=kept)
        return future, True

    def find(self, request_id: str, owner: str) -> Future | None:
        """Return an owner's request, or None if it is unknown or forgotten; raises StorageError if the database cannot be read."""
        found = self._look(request_id)
        return found if found is not None and found.owner == owner else None

    async def finish(self, future: Future, outcome: Outcome) -> None:
        """End a request, and wake everyone who waits for it once its answer is on disk; a later outcome of the same request is dropped.

        If the answer cannot be encoded or stored, the request ends as failed. The reason is logged and not shown to the owner.
        """
        if future.claim_end():
            # Others wait for it, even if this caller is cancelled.
            await asyncio.shield(asyncio.ensure_future(self._store_end(future, outcome)))

    async def retrieve(self, request_id: str, owner: str, *, timeout_s: float) -> Payload | Pending:
        """Return the answer of a request, or its `pending` if it has not ended within `timeout_s` seconds.

        Raises:
            UnknownError: the owner has no such request.
            LostError: the request was lost in a restart or forgotten, or its answer on disk is damaged.
            StorageError: the database cannot be read.
        """
        if (future := self._open.get(request_id)) is not None:
            if future.owner != owner:
                raise _unknown(request_id)
            return await future.wait(timeout_s)
        if hash(request_id) not in self._on_disk or (answer := await asyncio.to_thread(self._fetch, request_id, owner)) is None:
            raise self._missing(request_id, owner)
        self._fetched[request_id] = self._clock()
        return answer

    async def sweep(self) -> None:
        """Forget the answers whose retention has passed, and delete files no longer needed; raises StorageError if the database fails."""
        now = self._clock()
        self._fetched = {request_id: fetched for request_id, fetched in self._fetched.items() if fetched >= now - _KEPT_AFTER_FETCH_S}
        active = self._results.active  # answers stored from here on are in this file or a later one
        rows = [row for row in await asyncio.to_thread(self._store.futures_before, now - self._retention_s)
                if row.request_id not in self._fetched]
        await self._store.delete(*rows)  # afterwards, all answers stored earlier are in the database
        self._on_disk.difference_update([hash(row.request_id) for row in rows])
        for row in rows:
            self.usage.release_charge(row.owner, disk_bytes=row.length + ANSWER_ROW_BYTES)
        first = await asyncio.to_thread(self._store.first_segment)
        await asyncio.to_thread(self._results.delete_before, active if first is None else min(first, active))

    async def _store_end(self, future: Future, outcome: Outcome) -> None:
        answer: Payload | None = None

        def store_answer() -> FutureRow:
            nonlocal answer
            answer = self._encode(outcome)
            return self._row(future, answer)

        try:
            if future.kept:
                await self._store.put(store_answer)
                self._on_disk.add(hash(future.request_id))
                assert answer is not None, "a stored answer was encoded"
                self.usage.add(future.owner, disk_bytes=len(answer.data) + ANSWER_ROW_BYTES)
            else:
                answer = await asyncio.to_thread(self._encode, outcome)
        except Exception as exc:
            _log.error("request %s: its answer could not be kept: %s", future.request_id, exc, exc_info=not isinstance(exc, StorageError))
            # Waiting clients get a failure all the same, because it may be the one that reports their model's loss.
            if not isinstance(outcome, Failed):
                outcome = Failed(
                    f"request {future.request_id} has ended, but its answer could not be kept; the server's log says why", "server")
            answer = self._encode(outcome)
        del self._open[future.request_id]
        assert answer is not None, "an answer was encoded"
        future.set_answer(answer, outcome)

    def _look(self, request_id: str) -> Future | None:
        if (future := self._open.get(request_id)) is not None or hash(request_id) not in self._on_disk:
            return future
        row = self._store.find_future(request_id)
        return row and Future(request_id, owner=row.owner, kind=row.kind, created=row.created, answer=None)

    def _fetch(self, request_id: str, owner: str) -> Payload | None:
        row = self._store.find_future(request_id)
        if row is None or row.owner != owner:
            return None
        try:
            return Payload(row.content_type, self._results.read(Location(row.segment, row.start, row.length)))
        except StorageError as exc:
            _log.error("request %s: %s", request_id, exc)
            raise LostError(f"request {request_id} was carried out, but its answer is damaged on the server's disk") from exc

    def _row(self, future: Future, answer: Payload) -> FutureRow:
        return FutureRow(
            future.request_id, future.owner, future.kind, future.created, self._clock(), answer.content_type,
            *self._results.append(answer.data))

    def _missing(self, request_id: str, owner: str) -> LostError | UnknownError:
        try:
            session_owner = self._owner_of(session_of(request_id))
        except BadRequestError:
            session_owner = None
        if session_owner != owner:
            return _unknown(request_id)
        return LostError(f"the server does not know request {request_id} any more, as after a restart; send it again")


def _unknown(request_id: str) -> UnknownError:
    return UnknownError(f"there is no request {request_id[:200]!r}; use an id that this server answered with")
