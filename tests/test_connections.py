"""Connections are bounded before anybody knows who asks; raw sockets, for no client of HTTP would do what is tried here."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from dataclasses import replace

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from offbeat.connections import Bounds, Connections, address_of
from offbeat.listening import GuestServer, bind
from waiting import until

QUICK = Bounds(head_s=60.0, unread_s=0.2, unfetched_s=1.5)
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LARGE = 32 << 20


class Server:
    """A server that runs, and what it has open."""

    def __init__(self, port: int, connections: Connections) -> None:
        self.port = port
        self.connections = connections
        self.headers: list[tuple[str, str]] = []
        self.let_go = asyncio.Event()

    async def open(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=4 << 20)
        writer.write(data)
        return reader, writer

    @property
    def num_busy(self) -> int:
        """Connections with a request under way."""
        return len(self.connections) - len(self.connections._idle)

    async def ask(self, data: bytes) -> bytes:
        """All that comes back until the server ends the connection."""
        reader, writer = await self.open(data)
        with closing(writer):
            return await asyncio.wait_for(reader.read(), 60)


def run(body: Callable[[Server], Awaitable[None]], bounds: Bounds = QUICK, *, exempt: bool = True) -> None:
    async def answer(http: Request) -> PlainTextResponse:
        server.headers = http.headers.items()
        if http.url.path == "/body":
            try:
                return PlainTextResponse(str(len(await http.body())))
            except ClientDisconnect:
                return PlainTextResponse("")
        if http.url.path == "/later":
            await asyncio.sleep(1.2)
        if http.url.path == "/held":
            await server.let_go.wait()
        return PlainTextResponse("x" * LARGE if http.url.path == "/large" else "hello")

    async def main() -> None:
        nonlocal server
        app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
        connections = Connections(bounds, is_exempt=lambda _: exempt)
        with bind("127.0.0.1", 0, who="the test") as listener:
            http = GuestServer(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1), connections)
            task = asyncio.create_task(http.serve(sockets=[listener]))
            await http.ready.wait()
            server = Server(listener.getsockname()[1], connections)
            # The server sweeps every second, which is too seldom for a test.
            sweeps = asyncio.create_task(sweep(connections))
            await body(server)
            sweeps.cancel()
            http.should_exit = True
            await task
            assert not len(connections)

    server: Server = Server(0, Connections(bounds))
    asyncio.run(main())


async def sweep(connections: Connections) -> None:
    while True:
        connections.sweep()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("head", [
    b"GET /" + b"x" * 40_000, b"GET / HTTP/1.1\r\nx: " + b"x" * 40_000, b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 200,
    b"GET / HTTP/1.1\r\n" + b"x" * 40_000,
    b"GET / HTTP/1.1\r\n" + b"".join(b"x%d: %s\r\n" % (n, b"y" * 1000) for n in range(40)) + b"\r\n"])
def test_a_head_that_is_too_large_is_refused_before_it_is_whole(head: bytes) -> None:
    async def body(server: Server) -> None:
        answer = await server.ask(head)
        assert answer.startswith(b"HTTP/1.1 431 ") and b"may have 32768 bytes and 128 fields" in answer

    run(body)


def test_a_head_that_never_ends_holds_no_more_than_its_bound() -> None:
    """The case that took four times what was sent: 794 MiB."""
    async def body(server: Server) -> None:
        sent, (_, writer) = 0, await server.open(b"GET / HTTP/1.1\r\nx: ")
        with pytest.raises((ConnectionError, TimeoutError)):
            async with asyncio.timeout(60):
                for _ in range(200):
                    writer.write(b"x" * 2**20)
                    await writer.drain()
                    sent += 1
        assert sent < 100, "what was taken is in buffers of the system"
        writer.close()

    run(body)


def test_what_follows_the_last_piece_of_a_body_is_bounded_and_no_part_of_the_header() -> None:
    async def body(server: Server) -> None:
        chunked = b"POST /body HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n3\r\nabc\r\n0\r\n"
        answer = await server.ask(chunked + b"x-api-key: tml-forged\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"3")
        assert not [name for name, _ in server.headers if name == "x-api-key"]
        _, writer = await server.open(chunked)
        with suppress(ConnectionError):
            for _ in range(40):
                writer.write(b"x" * 1000)
                await asyncio.sleep(0.005)
        await until(lambda: not len(server.connections))
        writer.close()

    run(body)


@pytest.mark.parametrize("start", [b"", b"G", b"GET / HTTP/1.1\r\nHost: a\r\n", GET + b"GET / HT"])
def test_a_head_that_does_not_arrive_in_time_ends_its_connection(start: bytes) -> None:
    async def body(server: Server) -> None:
        answer = await server.ask(start)
        assert (b"HTTP/1.1 408 " in answer and b"did not arrive within 0.3 s" in answer) is bool(start)

    run(body, replace(QUICK, head_s=0.3))


def test_a_slow_answer_is_no_slow_head() -> None:
    async def body(server: Server) -> None:
        reader, writer = await server.open(GET.replace(b"/ ", b"/later "))
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n")  # the head of the next, unfinished while the first is answered
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")
        writer.write(b"\r\n")
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")
        writer.close()

    run(body, replace(QUICK, head_s=1.0))


def test_a_body_that_nobody_reads_is_not_waited_for() -> None:
    async def body(server: Server) -> None:
        reader, writer = await server.open(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")
        assert b"hello" in await reader.readuntil(b"hello")
        with pytest.raises((ConnectionError, TimeoutError)):
            async with asyncio.timeout(60):
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    if reader.at_eof():
                        raise ConnectionError
                    await asyncio.sleep(0.02)
        await until(lambda: not len(server.connections))
        writer.close()

    run(body)


def test_requests_that_are_sent_ahead_of_answers_are_few() -> None:
    async def body(server: Server) -> None:
        assert (await server.ask(GET.replace(b"/ ", b"/later ") * 50)).count(b"HTTP/1.1 200") <= 5
        reader, writer = await server.open(GET * 3)
        for _ in range(3):
            await reader.readuntil(b"hello")
        writer.close()

    run(body)


def test_what_is_no_http_is_told_so() -> None:
    async def body(server: Server) -> None:
        answer = await server.ask(b"\x16\x03\x01 hello\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ") and b"not a request of HTTP/1.1" in answer

    run(body)


def test_an_answer_that_is_not_fetched_is_given_up() -> None:
    async def body(server: Server) -> None:
        raw = socket.create_connection(("127.0.0.1", server.port))
        raw.sendall(GET.replace(b"/ ", b"/large "))
        await until(lambda: len(server.connections) == 1)
        await until(lambda: not len(server.connections))
        raw.close()
        reader, writer = await server.open(GET.replace(b"/ ", b"/large "))
        fetched = 0
        while fetched < LARGE:  # slowly, but it goes on
            fetched += len(piece := await reader.read(4 << 20))
            assert piece
            await asyncio.sleep(0.05)
        writer.close()

    run(body)


def test_the_oldest_idle_connection_makes_room_and_busy_ones_stay() -> None:
    async def body(server: Server) -> None:
        polls = [await server.open(GET.replace(b"/ ", b"/held ")) for _ in range(3)]
        await until(lambda: server.num_busy == 3)
        half_sent = [await server.open(b"GET / HT") for _ in range(40)]
        reader, writer = await server.open(GET)
        assert b"hello" in await reader.readuntil(b"hello")
        assert len(server.connections) == 8
        server.let_go.set()
        for reader, _ in polls:
            assert b"hello" in await reader.readuntil(b"hello")
        for _, other in [*polls, *half_sent, (reader, writer)]:
            other.close()

    run(body, replace(QUICK, connections=8))


def test_where_all_connections_are_busy_a_new_one_is_refused_with_a_sentence() -> None:
    async def body(server: Server) -> None:
        polls = [await server.open(GET.replace(b"/ ", b"/held ")) for _ in range(4)]
        await until(lambda: server.num_busy == 4)
        answer = await server.ask(GET)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"as many connections as it can hold" in answer
        server.let_go.set()
        for reader, writer in polls:
            assert b"hello" in await reader.readuntil(b"hello")
            writer.close()

    run(body, replace(QUICK, connections=4))


@pytest.mark.parametrize(("exempt", "left"), [(True, 6), (False, 3)])
def test_an_address_has_so_many_unless_it_is_exempt(exempt: bool, left: int) -> None:
    async def body(server: Server) -> None:
        opened = [await server.open(GET) for _ in range(6)]
        for reader, _ in opened[-left:]:
            assert b"hello" in await reader.readuntil(b"hello")
        await until(lambda: len(server.connections) == left)
        for _, writer in opened:
            writer.close()

    run(body, replace(QUICK, of_address=3), exempt=exempt)


def test_addresses_are_counted_by_what_one_client_has_of_them() -> None:
    assert address_of("203.0.113.5") == "203.0.113.5" == address_of("::ffff:203.0.113.5")
    assert address_of("2001:db8:0:1::5") == address_of("2001:db8:0:1:ffff::1%eth0") != address_of("2001:db8:0:2::5")
    assert (address_of("::1"), address_of("")) == ("::1", "")
