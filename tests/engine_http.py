"""An embedded engine behind HTTP, and calls to it, for tests of its endpoints."""

import asyncio
import contextlib
import json

import aiohttp

from offbeat.engine.options import EngineOptions
from offbeat.engine.server import EngineServer

RL = {"logprobs": 0, "return_token_ids": True, "ignore_eos": True}


@contextlib.contextmanager
def serving(folder: str, **options):
    server = EngineServer(EngineOptions(model=folder, **options))
    try:
        yield server, server.start()
    finally:
        server.stop()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


async def call(url: str, path: str, body: dict | None = None, *, headers: dict | None = None):
    """(status, headers, decoded answer) of a POST with a body, or a GET without."""
    async with aiohttp.ClientSession() as session:
        async with session.request("GET" if body is None else "POST", url + path, json=body, headers=headers) as response:
            text = await response.text()
            return response.status, response.headers, json.loads(text) if text.startswith("{") else text


def fetch(url: str, path: str, body: dict | None = None, **more):
    return run(call(url, path, body, **more))


async def until(condition) -> None:
    while not condition():  # noqa: ASYNC110 (the engine's thread sets no asyncio event)
        await asyncio.sleep(0.005)


async def stream(url: str, path: str, body: dict) -> list[dict]:
    async with aiohttp.ClientSession() as session:
        async with session.post(url + path, json=body) as response:
            assert response.status == 200 and response.content_type == "text/event-stream"
            lines = [line.decode().strip() async for line in response.content]
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]
