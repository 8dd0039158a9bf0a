"""Serves the live page until a signal ends it. Used by `offbeat watch`, and by the process that `live_page.LivePage` starts."""

import asyncio
import signal
import socket
from collections.abc import Sequence
from urllib.parse import quote

from offbeat.connections import Bounds, Connections
from offbeat.dashboard.library import RunLibrary
from offbeat.dashboard.site import make_site
from offbeat.listening import GuestServer, num_free_files, server_config, url_of
from offbeat.types import Hook

PORT = 8765
_MAX_CONNECTIONS = 1024
_KEEP_ALIVE_S = 5


async def serve_pages(
    library: RunLibrary, listener: socket.socket, *, key: str = "", ready: Hook,
    until: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
) -> None:
    """Serve the page on a bound socket until a signal comes.

    Args:
        key: key that every request must have; empty if only this machine can reach the server.
        ready: called once requests are answered.
        until: signals that end it.
    """
    most = int(max(min(_MAX_CONNECTIONS, num_free_files() // 2), 1))
    server = GuestServer(server_config(make_site(library, key=key), keep_alive_s=_KEEP_ALIVE_S), Connections(Bounds(connections=most)))
    loop = asyncio.get_running_loop()
    serving = loop.create_task(server.serve(sockets=[listener]))
    for name in until:
        loop.add_signal_handler(name, setattr, server, "should_exit", True)
    await server.ready.wait()
    ready()
    await serving


def page_url(listener: socket.socket, *, key: str = "") -> str:
    """Return the address of the page for a browser, with the key if there is one."""
    return url_of(listener, query=f"/?key={quote(key, safe='')}" if key else "/")
