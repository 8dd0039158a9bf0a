"""The HTTP application: all endpoints behind one gate that checks the key, bounds the body, turns errors into answers, and logs.

An error is `{"detail": one sentence}`. Status 5xx is for what is not the client's fault; clients then retry for minutes.
"""

import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from offbeat.errors import OffbeatError
from offbeat.service.app.auth import LOCAL_NAMES, Names, NamesGate, authenticate
from offbeat.service.app.body import Bodies
from offbeat.service.app.journal import Journal
from offbeat.service.app.readers import Readers
from offbeat.service.app.reply import Call, Endpoint, refusal
from offbeat.service.errors import OverLimitError, RequestError
from offbeat.service.keys import Keys
from offbeat.telemetry.log import current_request

Open = Callable[[Request], Awaitable[Response]]

_log = logging.getLogger(__name__)


def make_app(
    endpoints: Iterable[Endpoint], public: Iterable[Route], *, keys: Keys, bodies: Bodies, journal: Journal, names: Names = LOCAL_NAMES,
    max_requests_of_one: int = 2048,
) -> Starlette:
    """Create the application.

    Args:
        endpoints: endpoints for callers with a key.
        public: routes open to anybody.
        names: host names that the server answers to if any key is accepted.
        max_requests_of_one: requests that one owner may have under way, including polls.
    """
    gate = Gate(keys, bodies, journal, max_requests_of_one=max_requests_of_one)
    routes = [Route(endpoint.path, gate.guard(endpoint), methods=[endpoint.method]) for endpoint in endpoints]
    middleware = [Middleware(NamesGate, names=names)] if keys.any_will_do else []
    return Starlette(routes=[*public, *routes], middleware=middleware, exception_handlers={HTTPException: _no_such_endpoint})


class Gate:
    """Checks key, body and limits before every handler runs, and turns its errors into answers."""

    def __init__(self, keys: Keys, bodies: Bodies, journal: Journal, *, max_requests_of_one: int) -> None:
        self._keys = keys
        self._bodies = bodies
        self._journal = journal
        self._readers = Readers()
        self._max_requests_of_one = max_requests_of_one
        self._requests: Counter[str] = Counter()

    @contextmanager
    def _counted(self, owner: str) -> Iterator[None]:
        """Count a request as under way; raises OverLimitError if its owner has too many, since each holds a connection."""
        if self._requests[owner] >= self._max_requests_of_one:
            raise OverLimitError(f"you have {self._max_requests_of_one} requests under way, as many as you may at a time; send fewer")
        self._requests[owner] += 1
        try:
            yield
        finally:
            self._requests[owner] -= 1
            if not self._requests[owner]:
                del self._requests[owner]

    def guard(self, endpoint: Endpoint) -> Open:
        """Wrap an endpoint's handler so that it needs a key."""

        async def guarded(http: Request) -> Response:
            start, owner = time.monotonic(), ""
            request_id = uuid.uuid4().hex[:12]
            token = current_request.set(request_id)
            try:
                caller = authenticate(http, self._keys)
                owner = caller.owner
                with self._counted(owner):
                    async with self._bodies.reading(
                        http, owner, max_bytes=endpoint.max_body_bytes, may_be_packed=endpoint.max_body_bytes is None,
                    ) as body:
                        response, detail = await endpoint.handler(Call(http, caller, body, self._readers)), ""
            except Exception as exc:
                response, detail = _refuse(exc, endpoint, request_id)
            finally:
                current_request.reset(token)
            response.headers["x-request-id"] = request_id
            self._journal.note(
                endpoint, http.url.path, request_id=request_id, owner=owner, status=response.status_code,
                seconds=time.monotonic() - start, detail=detail)
            return response

        return guarded


def _refuse(exc: Exception, endpoint: Endpoint, request_id: str) -> tuple[Response, str]:
    """Return the answer to an error, and its sentence."""
    sentence, status, headers = str(exc), 503, {}
    match exc:
        case OverLimitError():
            status, headers = exc.status, {"retry-after": f"{exc.retry_after_s:g}"}
        case RequestError():
            status = exc.status
        case OffbeatError():  # such as a full disk or an unreachable database: it may pass, and clients must not learn where these are
            _log.error("%s %s failed: %s", endpoint.method, endpoint.path, exc)
            sentence = f"this server cannot do that for now, and its log says why under {request_id}; send the request again later"
            headers = {"retry-after": "2"}
        case _:
            _log.exception("%s %s failed", endpoint.method, endpoint.path)
            sentence, status = f"this server failed in a way that it did not expect; its log has the reason under {request_id}", 500
    return refusal(sentence, status=status, headers=headers), sentence


async def _no_such_endpoint(http: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException), "registered for nothing else"
    if exc.status_code == 405:
        return refusal(f"{http.url.path} does not take {http.method}", status=405)
    return refusal(f"this server has no {http.method} {http.url.path[:200]}", status=exc.status_code)
