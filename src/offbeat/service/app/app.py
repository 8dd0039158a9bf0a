"""The HTTP application: all endpoints behind one gate that checks the key, bounds the body, turns errors into answers, and logs.

An error is `{"detail": one sentence}`. Status 5xx is for errors that are not the client's fault; clients then retry for minutes.
"""

import time
import uuid
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from offbeat.chat.refusals import error_response, no_such_endpoint
from offbeat.chat.sending import ChatResponse
from offbeat.connections import write_detail
from offbeat.fleet.slots import counted
from offbeat.service.app.auth import LOCAL_NAMES, HostNames, NamesGate, authenticate
from offbeat.service.app.body import Bodies
from offbeat.service.app.journal import Journal
from offbeat.service.app.readers import Readers
from offbeat.service.app.reply import Call, Endpoint, explain
from offbeat.service.errors import OverLimitError
from offbeat.service.keys import Keys
from offbeat.telemetry.log import current_request


def make_app(
    endpoints: Iterable[Endpoint], public: Iterable[Route], *, keys: Keys, bodies: Bodies, journal: Journal, names: HostNames = LOCAL_NAMES,
    max_requests_of_one: int = 2048,
) -> Starlette:
    """Create the application of `endpoints` for callers with a key, and of `public` routes.

    Args:
        names: host names that the server answers to if any key is accepted.
        max_requests_of_one: requests that one owner may have under way, including polls.
    """
    gate = RequestGate(keys, bodies, journal, max_requests_of_one=max_requests_of_one)
    routes = [Route(endpoint.path, _Guarded(gate, endpoint), methods=[endpoint.method]) for endpoint in endpoints]
    middleware = [Middleware(NamesGate, names=names)] if keys.any_will_do else []
    no_endpoint = partial(no_such_endpoint, own=write_detail)
    return Starlette(routes=[*public, *routes], middleware=middleware, exception_handlers={HTTPException: no_endpoint})


class RequestGate:
    """Checks key, body and limits before every handler runs, and turns its errors into answers."""

    def __init__(self, keys: Keys, bodies: Bodies, journal: Journal, *, max_requests_of_one: int) -> None:
        self._keys = keys
        self._bodies = bodies
        self._journal = journal
        self._readers = Readers()
        self._max_requests_of_one = max_requests_of_one
        self._requests: Counter[str] = Counter()

    def _counted(self, owner: str) -> AbstractContextManager[None]:
        """Count a request as under way; raises OverLimitError if its owner has too many, since each holds a connection."""
        if self._requests[owner] >= self._max_requests_of_one:
            raise OverLimitError(f"you have {self._max_requests_of_one} requests under way, as many as you may at a time; send fewer")
        return counted(self._requests, owner)

    async def answer_request(self, endpoint: Endpoint, http: Request, send: Send) -> None:
        start, owner = time.monotonic(), ""
        request_id = uuid.uuid4().hex[:12]
        token = current_request.set(request_id)

        def note_end(status: int, detail: str) -> None:
            self._journal.note(
                endpoint, http.url.path, request_id=request_id, owner=owner, status=status, seconds=time.monotonic() - start, detail=detail)

        try:
            with ExitStack() as under_way:
                detail = ""
                try:
                    caller = authenticate(http, self._keys)
                    owner = caller.owner
                    under_way.enter_context(self._counted(owner))
                    async with self._bodies.reading(
                        http, owner, max_bytes=endpoint.max_body_bytes, may_be_packed=endpoint.max_body_bytes is None,
                    ) as body:
                        response = await endpoint.handler(Call(http, caller, body, self._readers))
                except Exception as exc:
                    told = explain(exc, f"{endpoint.method} {endpoint.path}")
                    detail = told.sentence
                    response = error_response(told, endpoint.write_error)
                response.headers["x-request-id"] = request_id
                if isinstance(response, ChatResponse):  # it waits now, and holds its connection for as long
                    response.ended = note_end
                else:
                    under_way.close()
                    note_end(response.status_code, detail)
                await response(http.scope, http.receive, send)
        finally:
            current_request.reset(token)


@dataclass(frozen=True)
class _Guarded:
    """An endpoint behind the gate, as a whole ASGI application, because the gate also sends the answer."""

    gate: RequestGate
    endpoint: Endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.gate.answer_request(self.endpoint, Request(scope, receive), send)
