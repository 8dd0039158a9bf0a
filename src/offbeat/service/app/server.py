"""The listening socket of the service, and uvicorn on the service's own event loop, within bounds. Used by `service.serve`."""

import socket
from functools import partial
from typing import Any, cast

import uvicorn

from offbeat.listening import GuestServer, bind
from offbeat.service.app.connections import Bounds, Connections, GuardedProtocol

_TICKS_PER_SWEEP = 10  # uvicorn ticks every 0.1 s


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address; connections are refused until the server is ready.

    Raises:
        PortBusyError: the address cannot be bound.
    """
    return bind(host, port, who="the service", another="another --port")


class HttpServer(GuestServer):
    """uvicorn on the event loop of the service, which handles signals itself."""

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
