"""Applications served on a free port of this machine, and requests to them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import uvicorn
from starlette.applications import Starlette

from offbeat.listening import GuestServer, bind


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def detail(self) -> str:
        """The sentence of an error."""
        return self.json["detail"]


@dataclass(frozen=True)
class Client:
    """Asks one server as the owner of one key."""

    url: str
    http: aiohttp.ClientSession
    key: str = "tml-alice"

    def of(self, key: str) -> "Client":
        """The same server, asked by another owner; without a key if it is empty."""
        return Client(self.url, self.http, key)

    async def ask(self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None) -> Answer:
        """One request; a body that is not bytes goes as JSON."""
        data = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        given = ({"x-api-key": self.key} if self.key else {}) | dict(headers or {})
        async with self.http.request(method, self.url + path, data=data, headers=given) as answer:
            return Answer(answer.status, answer.headers, await answer.read())

    async def post(self, name: str, body: Any = None, **options: Any) -> Answer:
        """POST below /api/v1."""
        return await self.ask("POST", f"/api/v1/{name}", body, **options)

    async def get(self, name: str) -> Answer:
        """GET below /api/v1."""
        return await self.ask("GET", f"/api/v1/{name}")


Serve = Callable[[Callable[[Client], Awaitable[None]]], None]
"""Runs a test's body, given a client."""


@asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[Client]:
    """The application on a free port while the body runs."""
    with bind("127.0.0.1", 0, who="the server") as listener:
        server = GuestServer(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await server.ready.wait()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as http:
            yield Client(f"http://127.0.0.1:{listener.getsockname()[1]}", http)
        server.should_exit = True
        await task
