"""Listening sockets, and uvicorn on an event loop that somebody else owns. Used by the engine, the service and the proxy of agents."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from offbeat.errors import PortBusyError


def bind(host: str, port: int, *, who: str, another: str = "another port") -> socket.socket:
    """Take an address, port 0 for a free one; connections are refused until a server listens there.

    Args:
        who: who is going to listen, for messages.
        another: what is to be chosen instead, for messages.

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


class GuestServer(uvicorn.Server):
    """uvicorn on an event loop that is not its own, whose owner handles signals; sets `ready` when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then set `ready`."""
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals, since the owner of the loop handles them."""
        yield
