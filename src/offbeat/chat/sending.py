"""Answers to chats on their way to clients, the same from every server: the engine, the service and the proxy of agents.

`ChatResponse` waits for an answer on the server's event loop and sends it in the client's dialect. A stream is sent when its answer is
complete, with keep-alive events before, so that neither clients nor proxies give up. A client that has gone is noticed at once.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from offbeat.chat.refusals import GONE, Explain
from offbeat.types import Hook

KEEP_ALIVE_S = 5.0
"""Seconds of silence after which a stream that waits sends a keep-alive event; clients and proxies wait longer."""
_JSON, _EVENTS = "application/json", "text/event-stream"


class Asked(Protocol):
    """The parts of a request that decide how its answer is sent."""

    @property
    def stream(self) -> bool: ...


class Writer(Protocol):
    """Writes an answer, as `ChatDialect` writes answers of chats."""

    keep_alive: bytes

    def whole(self, request: Any, answer: Any) -> bytes: ...

    def events(self, request: Any, answer: Any) -> Iterable[bytes]: ...

    def error(self, message: str, *, status: int, param: str = "") -> bytes: ...

    def stream_error(self, message: str, *, status: int) -> bytes: ...


class ChatResponse(Response):
    """Waits for the answer of a task and sends it. Before the last of it, calls `ended` once, with the status and the error's sentence."""

    def __init__(
        self, task: "asyncio.Task[Any]", dialect: Writer, request: Asked, *, explain: Explain, leave: Hook | None = None,
        sending: Hook = lambda: None, keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        """Prepare to wait.

        Args:
            explain: turns an error, or the task's cancellation, into one for clients.
            leave: called when the answer was sent or its client has gone; by default it cancels the task.
            sending: called when there is an answer, before it is sent.
            keep_alive_s: seconds between keep-alive events to a client that waits for a stream.
        """
        self._task, self._dialect, self._request = task, dialect, request
        self._explain, self._leave, self._sending = explain, leave or task.cancel, sending
        self._keep_alive_s = keep_alive_s if request.stream else None
        self.background, self.raw_headers = None, [(b"cache-control", b"no-store")]
        self.ended: Callable[[int, str], None] = lambda _status, _sentence: None
        task.add_done_callback(_retrieve)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        gone = asyncio.create_task(_gone(receive), name="client of a chat")
        ended = False
        try:
            begun = await self._wait(gone, send)
            if not gone.done():
                status, sentence, data, headers = self._outcome(begun=begun)
                ended = True
                self.ended(status, sentence)
                if not begun:
                    kind = _EVENTS if self._request.stream and status == 200 else _JSON
                    await self._start(send, status, {"content-type": kind, "content-length": str(len(data)), **headers})
                await send({"type": "http.response.body", "body": data, "more_body": False})
        finally:
            gone.cancel()
            self._leave()
            if not ended:
                self.ended(GONE, "the client went away before it was answered")

    async def _wait(self, gone: "asyncio.Task[None]", send: Send) -> bool:
        """Wait for the answer, or until the client has gone; returns whether the response has begun, with keep-alive events."""
        begun = False
        while not (await asyncio.wait({self._task, gone}, timeout=self._keep_alive_s, return_when=asyncio.FIRST_COMPLETED))[0]:
            if not begun:
                await self._start(send, 200, {"content-type": _EVENTS})
            begun = True
            await send({"type": "http.response.body", "body": self._dialect.keep_alive, "more_body": True})
        return begun

    def _outcome(self, *, begun: bool) -> tuple[int, str, bytes, Mapping[str, str]]:
        """Return status, sentence of an error, body and further headers."""
        dialect, request = self._dialect, self._request
        try:
            answer = self._task.result()
            data = b"".join(dialect.events(request, answer)) if request.stream else dialect.whole(request, answer)
            self._sending()
            return 200, "", data, {}
        except (Exception, asyncio.CancelledError) as exc:
            told = self._explain(exc)
            body = (
                dialect.stream_error(told.sentence, status=told.status) if begun
                else dialect.error(told.sentence, status=told.status, param=told.param))
            return told.status, told.sentence, body, told.headers

    async def _start(self, send: Send, status: int, headers: Mapping[str, str]) -> None:
        told = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": [*self.raw_headers, *told]})


async def _gone(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _retrieve(task: "asyncio.Task[Any]") -> None:
    """Read the error of a task that perhaps nobody else reads, so that asyncio does not complain."""
    if not task.cancelled():
        task.exception()
