"""The socket and the server on it."""

import asyncio
import signal
import socket

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from http_serving import serving
from offbeat.errors import PortBusyError
from offbeat.service.app.server import listen


def test_a_busy_port_and_an_address_of_another_machine_are_one_sentence() -> None:
    with listen("127.0.0.1", 0) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(PortBusyError, match=f"cannot listen on 127.0.0.1:{port}: .*choose another --port"), listen("127.0.0.1", port):
            pass
    with pytest.raises(PortBusyError, match="192.0.2.1"), listen("192.0.2.1", 0):
        pass


def test_connections_are_refused_until_the_server_is_ready() -> None:
    with listen("127.0.0.1", 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname())


def test_serving_leaves_signals_alone() -> None:
    async def body() -> None:
        before = signal.getsignal(signal.SIGINT)
        async with serving(Starlette(routes=[Route("/", lambda _: PlainTextResponse("hello"))])) as client:
            assert (await client.ask("GET", "/")).body == b"hello" and signal.getsignal(signal.SIGINT) is before

    asyncio.run(body())
