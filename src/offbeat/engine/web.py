"""HTTP around the engine: a server on a thread of its own, the check of clients, and the sending of answers and errors.

Used by `server` and `chats`.
"""

import asyncio
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import uvicorn
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from offbeat.chat.completions import Completions
from offbeat.chat.sending import GONE, Refusal, WriteError, param_of
from offbeat.connections import Connections
from offbeat.engine.adapters import UnknownAdapterError
from offbeat.errors import BusyError, OffbeatError, RefusedError, UserError
from offbeat.hosts import bearer_key, names_loopback
from offbeat.listening import BodyTooLargeError, BoundedServer, SlowBodyError, read_body, run_bounds

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
"""Largest body: eight million token ids."""
_PATIENCE_S = 60.0  # for a run's controller, which may be busy with something else

Handler = Callable[[HttpRequest], Coroutine[Any, Any, Response]]


class Disconnected(Exception):  # noqa: N818 (an event, not an error)
    """The client of a request disconnected."""


OPENAI: WriteError = Completions().error


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


def refusal(http: HttpRequest, key: str) -> tuple[str, int] | None:
    """Return the reason not to serve this client and its status, or None if it may be served.

    The key may also come in the header of Anthropic's older clients.
    """
    if key:
        given = bearer_key(http.headers.get("authorization", "")) or http.headers.get("x-api-key", "")
        if secrets.compare_digest(given.encode(), key.encode()):
            return None
        return "this engine wants its key; send it as 'Authorization: Bearer KEY'", 401
    host, origin = http.headers.get("host", ""), http.headers.get("origin")
    if not names_loopback(host):  # DNS rebinding: a page's own host name may resolve to this machine
        return f"this engine has no key, and so answers to 127.0.0.1 and localhost only, not to {host[:80]!r}", 403
    if origin is not None and not names_loopback(origin.partition("://")[2]):
        return f"this engine has no key, and so does nothing for a page of {origin[:80]!r}", 403
    kind = http.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if http.method == "POST" and kind != "application/json":  # a page may send other types without a CORS preflight
        return f"the body must be JSON, sent as 'Content-Type: application/json', got {kind[:80]!r}", 415
    return None


async def whole_body(http: HttpRequest) -> bytes:
    """Read the body of a request; errors as of `read_body`."""
    return await read_body(http, max_bytes=MAX_BODY_BYTES, patience_s=_PATIENCE_S)


def refusal_of(exc: BaseException) -> Refusal:
    """Return the status and text that a client gets for an error."""
    match exc:
        case BusyError():
            return Refusal(str(exc), 429, {"Retry-After": "1"})
        case UnknownAdapterError():
            return Refusal(str(exc), 404, param="model")
        case BodyTooLargeError():
            return Refusal(str(exc), 413)
        case SlowBodyError():
            return Refusal(str(exc), 408)
        case RefusedError() | UserError():
            return Refusal(str(exc), 400, param=param_of(exc))
        case Disconnected() | asyncio.CancelledError():
            return Refusal("the client went away", GONE)
        case OffbeatError():
            return Refusal(str(exc), 500)
        case _:
            logger.error("a request failed", exc_info=exc)
            return Refusal(f"unexpected {type(exc).__name__}: {exc}; the engine's log says where", 500)


def json_answer(data: bytes) -> Response:
    """Answer with JSON."""
    return Response(data, media_type="application/json")


def error_answer(
    message: str, *, status: int, write: WriteError = OPENAI, headers: Mapping[str, str] | None = None, param: str = "",
) -> Response:
    """Answer with an error; `param` is the field that is wrong, empty if it is none in particular."""
    return Response(write(message, status=status, param=param), status_code=status, headers=headers, media_type="application/json")
