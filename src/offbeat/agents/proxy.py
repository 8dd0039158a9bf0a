"""The proxy through which agents call the model that is being trained: three dialects over HTTP in front, token ids behind.

Runs on the event loop of the rollouts, for as long as `async with Proxy(...)`. A workflow opens a session per episode and gives its agent
the URL and the key. What the agent then asks is answered by `Generate`, which chooses an engine, asks another if that one dies, and tells
the version of each token; the session records it. A stream is sent when its answer is complete and recorded, with keep-alives before. A
client that has gone is noticed at once.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Self

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from offbeat.agents.recorder import Limits, Recorder
from offbeat.agents.sessions import Attempt, Call, SealedError, Session, SessionGroup, Sessions, UnknownKeyError
from offbeat.aio import deadline
from offbeat.chat.anthropic import Anthropic
from offbeat.chat.completions import Completions
from offbeat.chat.dialects import Dialect
from offbeat.chat.messages import ChatRequest
from offbeat.chat.parsing import AnswerParser
from offbeat.chat.rendering import Renderer
from offbeat.chat.responses import Responses
from offbeat.errors import BusyError, EngineError, OffbeatError, RefusedError, RunError, UserError
from offbeat.inference.sampling import Sampling
from offbeat.listening import GuestServer, bind
from offbeat.rollout.episode import Generate

MAX_BODY_BYTES = 32 << 20
_START_S = _STOP_S = 10.0

logger = logging.getLogger(__name__)


class TooLargeError(RunError):
    """A request's body is larger than `MAX_BODY_BYTES`."""


_STATUS: dict[type[Exception], int] = {
    UnknownKeyError: 401, SealedError: 409, TooLargeError: 413, BusyError: 429, RefusedError: 400, UserError: 400, EngineError: 503,
    OffbeatError: 503}
"""The status of each error; the first that fits counts. SDKs try again after 409, 429 and 503."""


class Proxy:
    """Answers agents, and records what they are answered.

    >>> async with Proxy(renderer, parser) as proxy:
    >>>     session = proxy.open(episode.generate, episode.sampling, limits=Limits(max_tokens=episode.context))
    >>>     reward = await play(base_url=f"{proxy.url}/v1", api_key=session.key)
    >>>     trajectories = session.chains(reward, episode=0)
    >>>     proxy.close(session)

    Attributes:
        url: where it listens, without /v1, which clients of OpenAI's API add to it and those of Anthropic's do not.
    """

    url = ""

    def __init__(
        self, renderer: Renderer, parser: AnswerParser, *, model: str = "policy", host: str = "127.0.0.1", port: int = 0,
        keep_alive_s: float = 5.0, linger_s: float = 10.0,
    ) -> None:
        """Make a proxy that does not listen yet.

        Args:
            model: the name under which the model is listed. Requests may name any.
            host, port: where to listen; port 0 chooses a free one.
            keep_alive_s: how often a client that waits for a stream is sent something.
            linger_s: how long a call runs on once its client has gone, who may try again.
        """
        self._renderer, self._parser, self._model = renderer, parser, model
        self._host, self._port, self._keep_alive_s = host, port, keep_alive_s
        self._sessions = Sessions(linger_s=linger_s)

    # -- life --------------------------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Listen.

        Raises:
            PortBusyError: the address cannot be bound.
            DeadlineError: uvicorn did not start in time.
        """
        listener = bind(self._host, self._port, who="the proxy of agents")
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            Starlette(routes=self._routes()), lifespan="off", access_log=False, log_level="warning", log_config=None, ws="none",
            timeout_keep_alive=75, timeout_graceful_shutdown=1)
        self._server = GuestServer(config)
        self._serving = asyncio.create_task(self._server.serve([listener]), name="proxy of agents")
        async with deadline("the proxy of agents to listen", _START_S):
            await self._server.ready.wait()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close all sessions and stop listening."""
        self._sessions.close_all()
        self._server.should_exit = True
        async with deadline("the proxy of agents to stop", _STOP_S):
            await self._serving

    # -- sessions ----------------------------------------------------------------------------------------------------------------------

    def open(
        self, generate: Generate, sampling: Sampling, *, limits: Limits | None = None, keep_reasoning: bool = True,
    ) -> Session:
        """Begin an episode, which has a key of its own; see `Recorder` for the arguments. `close` has to be called at its end."""
        return self._sessions.open(self._recorder(sampling, limits, keep_reasoning), generate)

    def open_group(
        self, generate: Generate, sampling: Sampling, *, limits: Limits | None = None, keep_reasoning: bool = True,
    ) -> SessionGroup:
        """Begin episodes that share a key and are told apart by the X-Session-ID header. `close` has to be called at their end."""
        return self._sessions.open_group(lambda: self._recorder(sampling, limits, keep_reasoning), generate)

    def close(self, ended: Session | SessionGroup) -> None:
        """Seal a session or a group; calls with its key are refused from now on."""
        self._sessions.close(ended)

    def path_url(self, session: Session | SessionGroup) -> str:
        """Return a base URL that holds the session's key, for clients that cannot be given one; without /v1, as `url` is."""
        return f"{self.url}/sessions/{session.key}"

    def _recorder(self, sampling: Sampling, limits: Limits | None, keep_reasoning: bool) -> Recorder:
        return Recorder(self._renderer, self._parser, sampling=sampling, limits=limits, keep_reasoning=keep_reasoning)

    # -- routes ------------------------------------------------------------------------------------------------------------------------

    def _routes(self) -> list[Route]:
        anthropic = Anthropic()
        table: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("POST", "/v1/chat/completions", self._answering(Completions())),
            ("POST", "/v1/responses", self._answering(Responses())),
            ("POST", "/v1/messages", self._answering(anthropic)),
            ("POST", "/v1/messages/count_tokens", self._counting(anthropic)),
            ("GET", "/v1/models", self._models),
        ]
        return [
            Route(before + path, handler, methods=[method]) for before in ("", "/sessions/{key}") for method, path, handler in table]

    def _answering(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        async def answer(http: Request) -> Response:
            try:
                session = self._session_of(http)
                body = await _body(http)
                request = dialect.read(body)
                call = session.enter(request, _attempt(http, body))
            except Exception as exc:
                return _refuse(dialect, exc)
            return _Answer(session, call, dialect, request, keep_alive_s=self._keep_alive_s)

        return answer

    def _counting(self, dialect: Anthropic) -> Callable[[Request], Awaitable[Response]]:
        async def count(http: Request) -> Response:
            try:
                self._session_of(http)
                request = dialect.read_count(await _body(http))
                return _json(dialect.count(len(self._renderer.prompt(request.messages, request.tools))))
            except Exception as exc:
                return _refuse(dialect, exc)

        return count

    async def _models(self, http: Request) -> Response:
        try:
            self._session_of(http)
        except OffbeatError as exc:
            return _refuse(Completions(), exc)
        model = {  # what both OpenAI's and Anthropic's clients read
            "id": self._model, "object": "model", "type": "model", "display_name": self._model, "owned_by": "offbeat", "created": 0,
            "created_at": "1970-01-01T00:00:00Z"}
        return _json(msgspec.json.encode(
            {"object": "list", "data": [model], "has_more": False, "first_id": self._model, "last_id": self._model}))

    def _session_of(self, http: Request) -> Session:
        bearer = http.headers.get("authorization", "").removeprefix("Bearer ").strip()
        # A key in the path comes first: clients that cannot be given a key send one that means nothing.
        key = http.path_params.get("key") or bearer
        try:
            return self._sessions.find(key, http.headers.get("x-session-id", ""))
        except UnknownKeyError:
            return self._sessions.find(http.headers.get("x-api-key", key), http.headers.get("x-session-id", ""))


class _Answer(Response):
    """Waits for the answer of a call and sends it in the client's dialect, unless the client goes first."""

    def __init__(self, session: Session, call: Call, dialect: Dialect, request: ChatRequest, *, keep_alive_s: float) -> None:
        self._session, self._call, self._dialect, self._request = session, call, dialect, request
        self._keep_alive_s = keep_alive_s if request.stream else None
        self.background = None

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_gone(receive), name="client of the proxy")
        try:
            begun = await self._wait(gone, send)
            if not gone.done():
                await self._send(send, begun=begun)
        finally:
            gone.cancel()
            self._session.leave(self._call)

    async def _wait(self, gone: "asyncio.Task[None]", send: Send) -> bool:
        """Wait for the answer, or until the client has gone; returns whether the response has begun, with keep-alives."""
        begun, waits = False, {self._call.task, gone}
        while not (await asyncio.wait(waits, timeout=self._keep_alive_s, return_when=asyncio.FIRST_COMPLETED))[0]:
            if not begun:
                await _start(send, _EVENTS)
            begun = True
            await send({"type": "http.response.body", "body": self._dialect.keep_alive, "more_body": True})
        return begun

    async def _send(self, send: Send, *, begun: bool) -> None:
        status = 200
        try:
            data = self._data()
            # Before it is sent, because a program may end its episode as soon as it has read its last answer.
            self._session.mark_read(self._call)
        except (Exception, asyncio.CancelledError) as exc:
            if isinstance(exc, asyncio.CancelledError):
                exc = SealedError("this episode ended before the answer was complete")
            status, message = _status_of(exc)
            data = self._dialect.stream_error(message, status=status) if begun else self._dialect.error(message, status=status)
        if not begun:
            await _start(send, _EVENTS if self._request.stream and status == 200 else _JSON, status=status, num_bytes=len(data))
        await send({"type": "http.response.body", "body": data, "more_body": False})

    def _data(self) -> bytes:
        answer = self._call.task.result()
        if not self._request.stream:
            return self._dialect.whole(self._request, answer)
        return b"".join(self._dialect.events(self._request, answer))


_JSON, _EVENTS = b"application/json", b"text/event-stream"


async def _start(send: Send, kind: bytes, *, status: int = 200, num_bytes: int | None = None) -> None:
    headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
    if num_bytes is not None:
        headers.append((b"content-length", str(num_bytes).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _gone(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(http: Request) -> bytes:
    parts, num_bytes = [], 0
    async for part in http.stream():
        num_bytes += len(part)
        if num_bytes > MAX_BODY_BYTES:
            raise TooLargeError(f"a request may have {MAX_BODY_BYTES >> 20} MiB; this one is larger")
        parts.append(part)
    return b"".join(parts)


def _attempt(http: Request, body: bytes) -> Attempt:
    tried = http.headers.get("x-stainless-retry-count", "0")
    endpoint = http.url.path.rpartition("/v1/")[2].encode()
    return Attempt(
        hashlib.blake2b(endpoint + b"\0" + body, digest_size=16).digest(), http.headers.get("idempotency-key", ""),
        is_retry=tried.isdigit() and int(tried) > 0)


def _status_of(exc: Exception) -> tuple[int, str]:
    """Return the HTTP status of an error, and its message."""
    status = next((status for kind, status in _STATUS.items() if isinstance(exc, kind)), None)
    if status is not None:
        return status, str(exc)
    logger.error("a call of an agent failed", exc_info=exc)
    return 500, f"unexpected {type(exc).__name__}: {exc}; the run's log says where"


def _refuse(dialect: Dialect, exc: Exception) -> Response:
    if isinstance(exc, ClientDisconnect):
        return Response(status_code=499)
    status, message = _status_of(exc)
    return _json(dialect.error(message, status=status), status=status)


def _json(data: bytes, *, status: int = 200) -> Response:
    return Response(data, status_code=status, media_type="application/json")
