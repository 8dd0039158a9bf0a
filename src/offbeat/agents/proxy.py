"""The proxy through which agents call the model that is being trained: three dialects over HTTP in front, token ids behind.

Runs on the event loop of the rollouts, for as long as `async with Proxy(...)`. A workflow opens a session per episode and gives its agent
the URL and the key. `Generate` answers the agent's calls: it chooses an engine, asks another if that one dies, and tells the version of
each token; the session records the answers. A stream is sent when its answer is complete and recorded, with keep-alives before. A client
that has gone is noticed at once.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from offbeat.agents.recorder import EpisodeLimits, Recorder
from offbeat.agents.sessions import Attempt, ProxySessions, SealedError, Session, SessionGroup, UnknownKeyError
from offbeat.aio import deadline
from offbeat.chat.anthropic import Anthropic
from offbeat.chat.completions import Completions
from offbeat.chat.dialects import ChatDialect, list_models, model_entry
from offbeat.chat.parsing import AnswerParser
from offbeat.chat.refusals import GONE, OPENAI, Refusal, Refusals, error_response, json_response, no_such_endpoint
from offbeat.chat.rendering import Renderer
from offbeat.chat.responses import Responses
from offbeat.chat.sending import KEEP_ALIVE_S, ChatResponse
from offbeat.connections import Connections
from offbeat.errors import BusyError, EngineError, OffbeatError, RefusedError, UserError
from offbeat.hosts import LOOPBACK, bearer_key, is_loopback
from offbeat.inference.sampling import Sampling
from offbeat.listening import BodyTooLargeError, GuestServer, SlowBodyError, bind, decode_body, read_body, run_bounds, server_config, url_of
from offbeat.rollout.episode import Generate
from offbeat.user_code.boundary import Caught

MAX_BODY_BYTES = 32 << 20
_START_S = _STOP_S = 10.0
_PATIENCE_S = 60.0  # for programs on a busy machine

logger = logging.getLogger(__name__)

_REFUSALS = Refusals("the run", {
    UnknownKeyError: 401, SealedError: 409, BodyTooLargeError: 413, SlowBodyError: 408, BusyError: 429, RefusedError: 400, UserError: 400,
    EngineError: 503, OffbeatError: 503})
"""SDKs try again after 409, 429 and 503."""


@dataclass(frozen=True)
class ProxyAddress:
    """Where a proxy listens; `port` 0 takes a free one. Its URL has `told_host`, for agents that do not reach `host`, or `host` if ""."""

    host: str = LOOPBACK
    port: int = 0
    told_host: str = ""


class Proxy:
    """Answers agents, and records the answers.

    >>> async with Proxy(renderer, parser) as proxy:
    >>>     session = proxy.open(episode.generate, episode.sampling, limits=EpisodeLimits(max_tokens=episode.context))
    >>>     reward = await play(base_url=f"{proxy.url}/v1", api_key=session.key)
    >>>     trajectories = session.chains(reward, episode=0)
    >>>     proxy.close(session)

    Attributes:
        url: where agents find it, such as "http://127.0.0.1:40123". Clients of OpenAI's API add /v1, clients of Anthropic's API do not.
        exposed: a sentence on who else reaches it; "" while it listens on this machine's own address.
    """

    url = ""
    exposed = ""

    def __init__(
        self, renderer: Renderer, parser: AnswerParser, *, model: str = "policy", address: ProxyAddress | None = None,
        keep_alive_s: float = KEEP_ALIVE_S, linger_s: float = 10.0,
    ) -> None:
        """Make a proxy that does not listen yet.

        Args:
            model: the name under which the model is listed. Requests may name any.
            address: where to listen; by default on this machine's own address.
            keep_alive_s: seconds between keep-alives to a client that waits for a stream.
            linger_s: seconds that a call runs on once its client has gone, who may try again.
        """
        self._renderer, self._parser, self._model = renderer, parser, model
        self._address, self._keep_alive_s = address or ProxyAddress(), keep_alive_s
        self._sessions = ProxySessions(linger_s=linger_s)
        self._started = time.time()

    async def __aenter__(self) -> Self:
        """Listen; raises PortBusyError if the address cannot be bound, DeadlineError if uvicorn did not start in time."""
        address = self._address
        listener = bind(address.host, address.port, who="the proxy of agents")
        self.url = url_of(listener, host=address.told_host or address.host)
        if not is_loopback(address.host):
            self.exposed = (
                f"the proxy of agents listens on {address.host}:{listener.getsockname()[1]}, beyond this machine: whoever reaches it and"
                " has an episode's key takes part in that episode, and nothing on the way is encrypted")
            logger.warning("%s", self.exposed)
        app = Starlette(routes=self._routes(), exception_handlers={HTTPException: no_such_endpoint})
        self._server = GuestServer(
            server_config(app, keep_alive_s=75, shutdown_s=1, log_config=None), Connections(run_bounds(), write_error=OPENAI))
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

    def open(self, generate: Generate, sampling: Sampling, *, limits: EpisodeLimits | None = None, keep_reasoning: bool = True) -> Session:
        """Begin an episode, which has a key of its own; see `Recorder` for the arguments. `close` has to be called at its end."""
        return self._sessions.open(self._recorder(sampling, limits, keep_reasoning), generate)

    def open_group(
        self, generate: Generate, sampling: Sampling, *, limits: EpisodeLimits | None = None, keep_reasoning: bool = True,
    ) -> SessionGroup:
        """Begin episodes that share a key and are told apart by the X-Session-ID header. `close` has to be called at their end."""
        return self._sessions.open_group(self._recorder(sampling, limits, keep_reasoning), generate)

    def close(self, ended: Session | SessionGroup) -> None:
        """Seal a session or a group; calls with its key are refused from now on."""
        self._sessions.close(ended)

    def path_url(self, session: Session | SessionGroup) -> str:
        """Return a base URL that holds the session's key, for clients that cannot be given one; without /v1, as `url` is."""
        return f"{self.url}/sessions/{session.key}"

    def _recorder(self, sampling: Sampling, limits: EpisodeLimits | None, keep_reasoning: bool) -> Recorder:
        return Recorder(self._renderer, self._parser, sampling=sampling, limits=limits, keep_reasoning=keep_reasoning)

    def _routes(self) -> list[Route]:
        anthropic = Anthropic("proxy")
        table: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("POST", "/v1/chat/completions", self._answering(Completions("proxy"))),
            ("POST", "/v1/responses", self._answering(Responses("proxy"))),
            ("POST", "/v1/messages", self._answering(anthropic)),
            ("POST", "/v1/messages/count_tokens", self._counting(anthropic)),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{name:path}", self._model_of),
        ]
        return [Route(before + path, handler, methods=[method]) for before in ("", "/sessions/{key}") for method, path, handler in table]

    def _answering(self, dialect: ChatDialect) -> Callable[[Request], Awaitable[Response]]:
        async def answer_call(http: Request) -> Response:
            with Caught() as caught:
                session = self._session_of(http)
                body = await _body(http)
                request = await decode_body(dialect.read, body)
                call = await session.receive(request, _attempt(http, body))
                return ChatResponse(
                    call.task, dialect, request, explain=_explain, leave=lambda: session.leave(call), keep_alive_s=self._keep_alive_s,
                    # before it is sent, since a program may end its episode as soon as it has read the last answer
                    sending=lambda: session.mark_read(call))
            return _refuse(dialect, caught.take())

        return answer_call

    def _counting(self, dialect: Anthropic) -> Callable[[Request], Awaitable[Response]]:
        async def count_tokens(http: Request) -> Response:
            with Caught() as caught:
                self._session_of(http)
                request = await decode_body(dialect.read, await _body(http))
                prompt = await asyncio.to_thread(self._renderer.prompt, request.messages, request.tools)
                return json_response(dialect.count(len(prompt)))
            return _refuse(dialect, caught.take())

        return count_tokens

    async def _models(self, http: Request) -> Response:
        try:
            self._session_of(http)
        except OffbeatError as exc:
            return _refuse(Completions(), exc)
        return json_response(list_models({self._model: self._started}))

    async def _model_of(self, http: Request) -> Response:
        name = http.path_params["name"]
        try:
            self._session_of(http)
        except OffbeatError as exc:
            return _refuse(Completions(), exc)
        if name != self._model:
            told = f"no model is called {name[:80]!r} here; it is {self._model!r}"
            return error_response(Refusal(told, 404, param="model"))
        return json_response(msgspec.json.encode(model_entry(name, self._started)))

    def _session_of(self, http: Request) -> Session:
        bearer = bearer_key(http.headers.get("authorization", ""))
        # A key in the path comes first: clients that cannot be given a key send a meaningless one.
        key = http.path_params.get("key") or bearer
        try:
            return self._sessions.session_of(key, http.headers.get("x-session-id", ""))
        except UnknownKeyError:
            return self._sessions.session_of(http.headers.get("x-api-key", key), http.headers.get("x-session-id", ""))


async def _body(http: Request) -> bytes:
    return await read_body(http, max_bytes=MAX_BODY_BYTES, patience_s=_PATIENCE_S)


def _attempt(http: Request, body: bytes) -> Attempt:
    tried = http.headers.get("x-stainless-retry-count", "0")
    endpoint = http.url.path.rpartition("/v1/")[2].encode()
    return Attempt(
        hashlib.blake2b(endpoint + b"\0" + body, digest_size=16).digest(), http.headers.get("idempotency-key", ""),
        is_retry=tried.isdigit() and int(tried) > 0)


def _explain(exc: BaseException) -> Refusal:
    """Return the reply that tells a client of an error, such as status 429 for `BusyError`."""
    sealed = isinstance(exc, asyncio.CancelledError)
    return _REFUSALS.explain(SealedError("this episode ended before the answer was complete") if sealed else exc)


def _refuse(dialect: ChatDialect, exc: BaseException) -> Response:
    return Response(status_code=GONE) if isinstance(exc, ClientDisconnect) else error_response(_explain(exc), dialect.error)
