"""Servers that stand for many engines, in processes of their own: each is a script that is started once more with --serve."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

NUM_SERVERS = 2


class StandIn(asyncio.Protocol):
    """One connection to such a server, which reads requests with as little CPU as there can be."""

    def __init__(self) -> None:
        self._received = b""

    def answer(self, head: bytes, body: bytes) -> None:
        """Answer a request through `transport`, now or later; `head` are its first line and its headers."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "the server listens on a stream"
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if found and len(body) >= length:
            self._received = body[length:]
            self.answer(head, body[:length])


def path_of(head: bytes) -> str:
    """The path of a request."""
    return head.split(b" ", 2)[1].decode()


def http(body: bytes) -> bytes:
    """An answer with that body, which is JSON."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def serve(connect: Callable[[], StandIn]) -> None:
    """Be a server: print the port, and answer until stdin closes."""
    server = await asyncio.get_running_loop().create_server(connect, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


@contextmanager
def servers(script: str, options: Sequence[str]) -> Iterator[list[str]]:
    """Start the servers; gives their URLs."""
    command = [sys.executable, script, "--serve", *options]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(NUM_SERVERS)]
    try:
        yield [f"http://127.0.0.1:{int(process.stdout.readline())}" for process in started if process.stdout is not None]
    finally:
        for process in started:
            process.communicate()
