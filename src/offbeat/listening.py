"""Listening sockets, uvicorn within bounds, and bodies of requests: the shell of every server.

The engine, the service, the proxy of agents and the live page declare their differences from each other in `server_config` and `Bounds`.

For any clients, a server holds a bounded number of connections, heads and bodies, and waits a bounded time for each (`connections`).
"""

import asyncio
import math
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast

import psutil
import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp

from offbeat.connections import Bounds, Connections, GuardedProtocol
from offbeat.errors import PortBusyError, RefusedError

T = TypeVar("T")

ReadBody = Callable[[bytes], T]
"""Reads a body, such as one of JSON, as a value of one type."""

LARGE_BYTES = 1 << 20
"""Size from which a body takes tens of milliseconds to decode, a pause for all clients of an event loop."""
PATIENCE_S = 10.0
"""Time for a body to begin, and for each pause in it."""
MIN_BYTES_PER_S = 16384
_TICKS_PER_SWEEP = 10  # uvicorn ticks every 0.1 s
_OPEN_FILES = 65536


class BodyTooLargeError(RefusedError):
    """A request's body is larger than its server takes."""


class SlowBodyError(RefusedError):
    """A request's body did not arrive in time."""


def bind(host: str, port: int, *, who: str, another: str = "another port") -> socket.socket:
    """Take an address, port 0 for a free one; connections are refused until a server listens there.

    `who`, such as "the engine", and `another`, the thing to choose instead, are for messages.

    Raises:
        PortBusyError: the address cannot be bound.
    """
    # asyncio turns Nagle's algorithm off only for sockets that name their protocol; with it, each answer would wait 40 ms.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        raise PortBusyError(f"{who} cannot listen on {host}:{port}: {exc.strerror or exc}; choose {another}, or 0 for a free one") from exc
    return listener


def allow_files() -> None:
    """Raise this process's limit of open files, since each client that waits holds a connection."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(_OPEN_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        with suppress(ValueError, OSError):  # a system may allow less than its limit says, as macOS does; then fewer connections are held
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def num_free_files() -> float:
    """Return how many more files this process may open, a connection being one; infinite without a limit."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if most == resource.RLIM_INFINITY else most - psutil.Process().num_fds()


def run_bounds() -> Bounds:
    """Return the bounds of a server for a run's own requests: as many connections as open files allow, also from one address.

    Half-sent and idle connections of others still give way to new ones.
    """
    allow_files()
    most = int(max(min(num_free_files(), _OPEN_FILES) * 3 // 4, 1))
    return Bounds(connections=most, of_address=most, unfetched_s=300.0)


def url_of(listener: socket.socket, *, host: str = "", query: str = "") -> str:
    """Return the address of a bound socket for clients, such as "http://127.0.0.1:8000".

    Args:
        host: name under which clients reach it; by default the one that it is bound to, or this machine's name if it is bound to all.
        query: end of the address, such as "/?key=k".
    """
    bound, port = listener.getsockname()[:2]
    host = host or (socket.gethostname() if bound in ("0.0.0.0", "::") else bound)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{query}"


def server_config(app: ASGIApp, *, keep_alive_s: int, shutdown_s: int | None = None, **others: Any) -> uvicorn.Config:
    """Return uvicorn's configuration of a server: no life span, no log of requests, no name of the software in answers.

    Args:
        keep_alive_s: seconds after which a connection without a request is closed.
        shutdown_s: seconds that requests have to end when the server stops; None waits for all.
        others: differences from the other servers, such as `log_config=None`.
    """
    settings = {"lifespan": "off", "access_log": False, "log_level": "warning", "server_header": False} | others
    return uvicorn.Config(app, timeout_keep_alive=keep_alive_s, timeout_graceful_shutdown=shutdown_s, **settings)


class BoundedServer(uvicorn.Server):
    """uvicorn whose connections are within bounds."""

    def __init__(self, config: uvicorn.Config, connections: Connections | None = None) -> None:
        """`connections` counts all connections; by default within the default bounds."""
        self._open = Connections(Bounds()) if connections is None else connections
        config.http = cast(Any, partial(GuardedProtocol, connections=self._open))
        config.ws = "none"  # an upgraded connection would leave the bounds
        super().__init__(config)

    async def on_tick(self, counter: int) -> bool:
        """Sweep connections once a second. Called ten times a second; returns whether to exit."""
        if counter % _TICKS_PER_SWEEP == 0:
            self._open.sweep()
        return await super().on_tick(counter)


class GuestServer(BoundedServer):
    """uvicorn on another's event loop, whose owner handles signals; sets `ready` when it listens."""

    def __init__(self, config: uvicorn.Config, connections: Connections | None = None) -> None:
        super().__init__(config, connections)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals, since the owner of the loop handles them."""
        yield


async def decode_body(read: ReadBody[T], body: bytes) -> T:
    """Decode a body, a large one on a thread, so that the event loop goes on meanwhile; errors are those of `read`."""
    return read(body) if len(body) <= LARGE_BYTES else await asyncio.to_thread(read, body)


async def read_body(http: Request, *, max_bytes: int, patience_s: float = PATIENCE_S) -> bytes:
    """Read a request's body within bounds.

    Args:
        max_bytes: of the whole body; one that says that it is larger is refused unread.
        patience_s: how long the body may pause; in all it must arrive at `MIN_BYTES_PER_S`.

    Raises:
        BodyTooLargeError: it is larger.
        SlowBodyError: it arrives too slowly.
        ClientDisconnect: the client went away.
    """
    declared = http.headers.get("content-length", "")
    parts: list[bytes] = []
    num_bytes = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
    if num_bytes > max_bytes:
        raise _too_large(max_bytes)
    num_bytes = 0
    try:
        async with asyncio.timeout(patience_s) as patience:
            async for part in http.stream():
                num_bytes += len(part)
                if num_bytes > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
                extend(patience, len(part), patience_s=patience_s)
    except TimeoutError as exc:
        raise SlowBodyError(
            f"{num_bytes} bytes of the body arrived, and then fewer than {MIN_BYTES_PER_S} a second for {patience_s:g} s; send it again"
        ) from exc
    return b"".join(parts)


def extend(patience: asyncio.Timeout, num_bytes: int, *, patience_s: float = PATIENCE_S, min_bytes_per_s: float = MIN_BYTES_PER_S) -> None:
    """Extend the deadline for each byte, but never beyond the initial patience: bodies that stall or trickle run out of time."""
    now, until = asyncio.get_running_loop().time(), patience.when()
    assert until is not None, "it has a deadline from the start"
    patience.reschedule(min(until + num_bytes / min_bytes_per_s, now + patience_s))


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"a request may have {max_bytes >> 20} MiB; this one is larger")
