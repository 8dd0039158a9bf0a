"""Requests in flight: submits the requests of one HTTP body to the engine and brings its messages to the handler that waits.

A handler waits on a queue of its own, which the engine's events reach in one hop per step. When its client disconnects, all requests of the
body are aborted. Used by the server's endpoints, on its event loop.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from offbeat.aio import deadline
from offbeat.engine.loop import EngineLoop
from offbeat.engine.request import Event, Output, Request, Scored, ScoreJob
from offbeat.engine.web import Disconnected
from offbeat.errors import EngineError

T = TypeVar("T")

_COMPILE_TIMEOUT_S = 30.0

Inbox = asyncio.Queue[Output | Scored | EngineError | Disconnected]
"""Messages of the engine to the requests of one body."""


class Submissions:
    """The requests that clients wait for, by their ids; `len` is their number."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._inboxes: dict[str, _Numbered] = {}

    def __len__(self) -> int:
        return len(self._inboxes)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._inboxes

    def ended(self, request_id: str) -> list[Output]:
        """Return the samples of a request that have ended while others of it run, numbered from 0."""
        inbox = self._inboxes.get(request_id)
        return [] if inbox is None else inbox.ended

    def dispatch(self, events: Sequence[Event]) -> None:
        """Bring the engine's events to those who wait for them; others are dropped."""
        for event in events:
            inbox = self._inboxes.get(event.request_id)
            if inbox is not None:
                inbox.put_nowait(event.result)

    async def outputs(self, http: HttpRequest, *requests: Request) -> AsyncGenerator[Output]:
        """Run requests; yields their outputs until all samples are done, and aborts them if the caller stops early.

        Samples are numbered through all requests, such as 0, 1 of the first and 2, 3 of the second for n = 2.

        Raises:
            EngineError: the engine refused one or failed.
            Disconnected: the client disconnected.
        """
        requests = await self._with_grammars(requests)
        unfinished = sum(request.n for request in requests)
        async with self.submitted(http, *requests) as inbox:
            while unfinished:
                output = await next_message(inbox, Output)
                unfinished -= output.finish_reason is not None
                yield output

    async def _with_grammars(self, requests: Sequence[Request]) -> tuple[Request, ...]:
        """Compile the structure that the requests of one body share, on a thread beside the engine's."""
        structure = requests[0].params.shaping.structure
        if structure is None:
            return tuple(requests)
        async with deadline("the structure of an answer to be compiled", _COMPILE_TIMEOUT_S):
            grammar = await asyncio.to_thread(self._loop.engine.grammars.compile, structure)
        return tuple(replace(request, grammar=grammar) for request in requests)

    @asynccontextmanager
    async def submitted(self, http: HttpRequest, *requests: Request | ScoreJob) -> AsyncIterator[Inbox]:
        """Submit the requests of one body and give their inbox to the caller's; one that ends with an exception aborts all of them."""
        inbox: Inbox = asyncio.Queue()
        first = 0
        for request in requests:
            self._inboxes[request.id] = _Numbered(inbox, first)
            first += request.n if isinstance(request, Request) else 1
        watch = asyncio.create_task(self._watch(http, inbox, requests), name=f"disconnect of {requests[0].id}")
        for request in requests:
            self._loop.submit(request)
        try:
            yield inbox
        except BaseException:
            self._abort(requests)
            raise
        finally:
            watch.cancel()
            for request in requests:
                del self._inboxes[request.id]

    async def _watch(self, http: HttpRequest, inbox: Inbox, requests: Sequence[Request | ScoreJob]) -> None:
        """Abort requests as soon as their client disconnects; their handler may be busy sending, or waiting for the next output."""
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self._abort(requests)
        inbox.put_nowait(Disconnected())

    def _abort(self, requests: Sequence[Request | ScoreJob]) -> None:
        for request in requests:
            self._loop.abort(request.id)


@dataclass(frozen=True)
class _Numbered:
    """Puts the engine's events of one request into an inbox, with its samples numbered from `first` on, and keeps those that have ended."""

    inbox: Inbox
    first: int
    ended: list[Output] = field(default_factory=list)

    def put_nowait(self, result: Output | Scored | EngineError) -> None:
        if isinstance(result, Output) and result.finish_reason is not None:
            self.ended.append(result)
        if self.first and not isinstance(result, EngineError):
            result = replace(result, index=result.index + self.first)
        self.inbox.put_nowait(result)


async def next_message(inbox: Inbox, kind: type[T]) -> T:
    """Wait for the next message, which is of this kind; raises it if it is an error."""
    result = await inbox.get()
    if isinstance(result, Exception):
        raise result
    assert isinstance(result, kind), "the engine answers what it was asked"
    return result
