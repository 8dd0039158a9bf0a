"""Strangers who send what nobody should to an engine, to the proxy of agents or to the live page keep neither memory nor places."""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from offbeat.agents.proxy import Proxy
from offbeat.engine.options import EngineOptions
from offbeat.engine.server import EngineServer
from rollout_samples import write_small_run
from sdk.server import MODEL_NAME
from sdk.small_model import build_model
from small_run import start_offbeat

PATHS = {"engine": "/health", "proxy": "/v1/models", "page": "/api/runs"}
"""What answers at once, whatever it says to a stranger."""
TAKE = {"engine": b"/v1/completions", "proxy": b"/v1/chat/completions"}
"""What takes a body."""


@contextmanager
def engine(folder: Path) -> Iterator[int]:
    server = EngineServer(EngineOptions(model=str(build_model(folder / MODEL_NAME))))
    try:
        yield int(server.start().rpartition(":")[2])
    finally:
        server.stop()


@contextmanager
def proxy(_: Path) -> Iterator[int]:
    ready, ports, stop = threading.Event(), [], None

    async def serve() -> None:
        nonlocal stop
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        async with Proxy(MagicMock(), MagicMock()) as running:
            ports.extend([int(running.url.rpartition(":")[2]), lambda: loop.call_soon_threadsafe(stop.set)])
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield ports[0]
    finally:
        ports[1]()
        thread.join(60)


@contextmanager
def page(folder: Path) -> Iterator[int]:
    write_small_run(folder / "mine")
    process = start_offbeat("watch", str(folder / "mine"), "--port", "0")
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline().partition("http://127.0.0.1:")[2].partition("/")[0])
    finally:
        process.terminate()
        process.communicate(timeout=60)


SERVERS: dict[str, Callable] = {"engine": engine, "proxy": proxy, "page": page}


@pytest.fixture(scope="module", params=SERVERS)
def door(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """The name and the port of a server."""
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as port:
        yield request.param, port


def connect(port: int, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=90)
    connection.sendall(data)
    return connection


def everything(connection: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionError):
        while piece := connection.recv(65536):
            received += piece
    return received


def get(port: int, path: str) -> bytes:
    with closing(connect(port, f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())) as connection:
        return everything(connection)


def post(path: bytes, length: int) -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (path, length)


def test_large_headers_and_many_fields_are_refused(door: tuple[str, int]) -> None:
    _, port = door
    with closing(connect(port, b"GET / HTTP/1.1\r\nx: ")) as connection, suppress(ConnectionError):
        sent = 0
        for _ in range(100):
            connection.sendall(b"x" * 2**20)
            sent += 1
    assert sent < 100
    with closing(connect(port, b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 1000 + b"\r\n")) as connection:
        assert everything(connection).startswith(b"HTTP/1.1 431 ")


def test_half_sent_requests_end_with_a_sentence_and_shut_nobody_out(door: tuple[str, int]) -> None:
    name, port = door
    with ExitStack() as stack:
        half = [stack.enter_context(closing(connect(port, b"GET / HTTP/1.1\r\nhost: local"))) for _ in range(200)]
        assert get(port, PATHS[name]).startswith(b"HTTP/1.1 ")
        answer = everything(half[0])
        assert answer.startswith(b"HTTP/1.1 408 ") and b"did not arrive within 10 s" in answer


def test_a_body_that_is_said_to_be_too_large_is_not_waited_for(door: tuple[str, int]) -> None:
    name, port = door
    if name in TAKE:
        with closing(connect(port, post(TAKE[name], 1 << 40))) as connection:
            answer = everything(connection)
        assert answer.startswith(b"HTTP/1.1 413 ") if name == "engine" else answer.startswith(b"HTTP/1.1 401 "), answer[:200]
    with closing(connect(port, post(PATHS[name].encode(), 1 << 20) + b"x" * 100)) as connection:
        assert everything(connection).startswith(b"HTTP/1.1 405 "), "and its rest is not waited for either"
