"""HTTP around the engine: a server on a thread of its own, the check of clients, and the statuses of errors.

Used by `server` and `chats`.
"""

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from offbeat.chat.refusals import GONE, OPENAI, Refusal, Refusals
from offbeat.connections import Connections
from offbeat.engine.adapters import UnknownAdapterError
from offbeat.errors import BusyError, OffbeatError, RefusedError, UserError
from offbeat.hosts import bearer_key, names_loopback
from offbeat.listening import BodyTooLargeError, BoundedServer, SlowBodyError, read_body, run_bounds

MAX_BODY_BYTES = 64 << 20
"""Largest body: eight million token ids."""
_PATIENCE_S = 60.0  # for a run's controller, which may be busy with something else

Handler = Callable[[HttpRequest], Coroutine[Any, Any, Response]]


class Disconnected(Exception):  # noqa: N818 (an event, not an error)
    """The client of a request disconnected."""


class HttpServer(BoundedServer):
    """A uvicorn server on a thread of its own, which reports when it listens and on which event loop it runs."""

    loop: asyncio.AbstractEventLoop

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config, Connections(run_bounds(), write_error=OPENAI))
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        self.ready.set()


def refusal(http: HttpRequest, key: str) -> Refusal | None:
    """Return the reason not to serve this client, or None; older clients of Anthropic send the key in a header of their own."""
    if key:
        given = bearer_key(http.headers.get("authorization", "")) or http.headers.get("x-api-key", "")
        if secrets.compare_digest(given.encode(), key.encode()):
            return None
        return Refusal("this engine wants its key; send it as 'Authorization: Bearer KEY'", 401)
    host, origin = http.headers.get("host", ""), http.headers.get("origin")
    if not names_loopback(host):  # DNS rebinding: a page's own host name may resolve to this machine
        return Refusal(f"this engine has no key, and so answers to 127.0.0.1 and localhost only, not to {host[:80]!r}", 403)
    if origin is not None and not names_loopback(origin.partition("://")[2]):
        return Refusal(f"this engine has no key, and so does nothing for a page of {origin[:80]!r}", 403)
    kind = http.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if http.method == "POST" and kind != "application/json":  # a page may send other types without a CORS preflight
        return Refusal(f"the body must be JSON, sent as 'Content-Type: application/json', got {kind[:80]!r}", 415)
    return None


async def whole_body(http: HttpRequest) -> bytes:
    """Read the body of a request; errors as of `read_body`."""
    return await read_body(http, max_bytes=MAX_BODY_BYTES, patience_s=_PATIENCE_S)


_REFUSALS = Refusals("the engine", {
    BusyError: 429, UnknownAdapterError: 404, BodyTooLargeError: 413, SlowBodyError: 408, RefusedError: 400, UserError: 400,
    OffbeatError: 500}, {429: {"Retry-After": "1"}})


def refusal_of(exc: BaseException) -> Refusal:
    """Return the status and text that a client gets for an error."""
    if isinstance(exc, Disconnected | asyncio.CancelledError):
        return Refusal("the client went away", GONE)
    return _REFUSALS.explain(exc)
