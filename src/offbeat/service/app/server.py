"""The socket that the service listens on, and uvicorn on the service's own event loop. Used by `service.serve`."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from offbeat.errors import PortBusyError


@contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """A socket bound to the address; connections are refused until the server is ready.

    Raises:
        PortBusyError: it cannot be had.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as exc:
            raise PortBusyError(
                f"the service cannot listen on {host}:{port}: {exc.strerror or exc}; choose another --port, or 0 for a free one") from exc
        yield listener


class HttpServer(uvicorn.Server):
    """uvicorn on the event loop of the service, which looks after signals itself."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
