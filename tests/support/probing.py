"""What probes are given: a client of a real server, and servers of their own."""

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp

from http_serving import Client
from sdk.server import Server

Body = Callable[[Client], Awaitable[None]]
Probe = Callable[[Body], None]
"""Runs a body that is given a client."""
StartServer = Callable[..., Server]
"""Starts a server with the options of `offbeat serve` that it is given."""


def run_probe(server: Server, body: Body) -> None:
    """Run a body that is given a client of a server."""

    async def main() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as http:
            await body(Client(server.url, http))

    asyncio.run(main())
