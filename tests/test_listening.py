"""Listening sockets."""

import asyncio
import resource
import signal
import socket
import threading
from contextlib import closing

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from http_serving import serving
from offbeat.errors import PortBusyError
from offbeat.listening import LARGE_BYTES, BodyTooLargeError, SlowBodyError, bind, decode_body, read_body, run_bounds, server_config, url_of


def test_a_port_that_is_taken_is_told() -> None:
    with bind("127.0.0.1", 0, who="the engine") as listener:
        listener.listen()
        with pytest.raises(PortBusyError, match="the engine cannot listen on .* choose another port"):
            bind("127.0.0.1", listener.getsockname()[1], who="the engine")


def test_answers_do_not_wait_for_more_to_send() -> None:
    with bind("127.0.0.1", 0, who="the engine") as listener:
        assert listener.proto == socket.IPPROTO_TCP  # by which asyncio knows that it may turn Nagle's algorithm off


def test_a_run_may_have_as_many_connections_as_it_may_open_files_and_all_from_one_address() -> None:
    bounds = run_bounds()
    now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = 65536 if now == resource.RLIM_INFINITY else min(now, 65536)
    assert bounds.of_address == bounds.connections and now // 2 < bounds.connections < now


@pytest.mark.parametrize("refusal", [ValueError("current limit exceeds maximum limit"), PermissionError()])
def test_a_system_that_lets_no_limit_be_raised_bounds_connections_by_the_one_that_it_has(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception,
) -> None:
    def refuse(*_: object) -> None:
        raise refusal

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1 << 20))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert run_bounds().connections < 1024


def test_a_body_is_read_within_its_bounds() -> None:
    async def answer(http: Request) -> PlainTextResponse:
        try:
            return PlainTextResponse(str(len(await read_body(http, max_bytes=1 << 20, patience_s=0.3))))
        except (BodyTooLargeError, SlowBodyError) as exc:
            return PlainTextResponse(f"{type(exc).__name__}: {exc}")

    async def body() -> None:
        async with serving(Starlette(routes=[Route("/", answer, methods=["POST"])])) as client:

            async def parts(size: int):
                for _ in range(size >> 16):
                    yield bytes(1 << 16)

            async def ask(data: object) -> str:
                async with client.http.post(client.url, data=data) as got:
                    return await got.text()

            assert await ask(bytes(1 << 20)) == await ask(parts(1 << 20)) == str(1 << 20)
            assert await ask(parts(2 << 20)) == "BodyTooLargeError: a request may have 1 MiB; this one is larger"
            port = int(client.url.rpartition(":")[2])
            slow = 1000, b"x" * 999, b"SlowBodyError: 999 bytes of the body arrived"
            for length, sent, said in (slow, (1 << 40, b"", b"BodyTooLargeError")):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                with closing(writer):
                    writer.write(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % length + sent)
                    assert said in await asyncio.wait_for(reader.read(), 30)

    asyncio.run(body())


def test_a_large_body_is_decoded_beside_the_event_loop_and_a_small_one_on_it() -> None:
    async def threads() -> list[bool]:
        here = threading.current_thread()
        return [await decode_body(lambda _: threading.current_thread() is here, b"x" * size) for size in (LARGE_BYTES, LARGE_BYTES + 1)]

    assert asyncio.run(threads()) == [True, False]


def test_an_address_that_cannot_be_bound_is_one_sentence_with_another_choice() -> None:
    with bind("127.0.0.1", 0, who="the service") as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(PortBusyError, match=f"the service cannot listen on 127.0.0.1:{port}: .*choose another --port"):
            bind("127.0.0.1", port, who="the service", another="another --port")
    with pytest.raises(PortBusyError, match="192.0.2.1"):
        bind("192.0.2.1", 0, who="the service")


def test_connections_are_refused_until_a_server_listens() -> None:
    with bind("127.0.0.1", 0, who="the service") as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname())


def test_a_guest_leaves_signals_alone() -> None:
    async def body() -> None:
        before = signal.getsignal(signal.SIGINT)
        async with serving(Starlette(routes=[Route("/", lambda _: PlainTextResponse("hello"))])) as client:
            assert (await client.ask("GET", "/")).body == b"hello" and signal.getsignal(signal.SIGINT) is before

    asyncio.run(body())


@pytest.mark.parametrize(("bound", "host", "query", "url"), [
    ("127.0.0.1", "", "", "http://127.0.0.1:{}"), ("127.0.0.1", "box", "/?key=k", "http://box:{}/?key=k"),
    ("127.0.0.1", "::1", "", "http://[::1]:{}"), ("0.0.0.0", "", "/", f"http://{socket.gethostname()}:{{}}/")])
def test_the_address_for_clients_names_the_host_that_they_reach(bound: str, host: str, query: str, url: str) -> None:
    with bind(bound, 0, who="the service") as listener:
        assert url_of(listener, host=host, query=query) == url.format(listener.getsockname()[1])


def test_a_server_has_neither_life_span_nor_log_of_requests_and_declares_its_differences() -> None:
    config = server_config(Starlette(), keep_alive_s=7, shutdown_s=2, log_level="error")
    assert (config.lifespan, config.access_log, config.server_header, config.log_level) == ("off", False, False, "error")
    assert (config.timeout_keep_alive, config.timeout_graceful_shutdown) == (7, 2)
