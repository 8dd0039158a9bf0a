"""The listening socket of the service, and uvicorn on the service's own event loop, within bounds. Used by `service.serve`."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import uvicorn

from offbeat.errors import PortBusyError
from offbeat.service.app.connections import Bounds, Connections, GuardedProtocol

_TICKS_PER_SWEEP = 10  # uvicorn ticks every 0.1 s


@contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket bound to the address; connections are refused until the server is ready.

    Raises:
        PortBusyError: the address cannot be bound.
    """
    # asyncio turns Nagle's algorithm off only for sockets that name their protocol; with it, each answer would wait 40 ms.
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as exc:
            raise PortBusyError(
                f"the service cannot listen on {host}:{port}: {exc.strerror or exc}; choose another --port, or 0 for a free one") from exc
        yield listener


class HttpServer(uvicorn.Server):
    """uvicorn on the event loop of the service, which handles signals itself."""

    def __init__(self, config: uvicorn.Config, connections: Connections | None = None) -> None:
        """`connections` counts all connections; by default within the default bounds."""
        self._open = Connections(Bounds()) if connections is None else connections
        config.http = cast(Any, partial(GuardedProtocol, connections=self._open))
        config.ws = "none"  # an upgraded connection would leave the bounds
        super().__init__(config)
        self.ready = asyncio.Event()

    async def on_tick(self, counter: int) -> bool:
        """Sweep connections once a second. Called ten times a second; returns whether to exit."""
        if counter % _TICKS_PER_SWEEP == 0:
            self._open.sweep()
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then set `ready`."""
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals, since the service handles them."""
        yield
