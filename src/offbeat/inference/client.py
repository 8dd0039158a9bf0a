"""One engine over HTTP: generation for rollouts and control for publishers.

The client bounds every call by a deadline and turns failures into errors; its dialect writes requests and reads answers.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Self, TypeVar

import aiohttp
import msgspec
import numpy as np

from offbeat.aio import HaltingClock, deadline
from offbeat.errors import BusyError, EngineError, OffbeatError, RefusedError
from offbeat.inference.dialects.base import Dialect
from offbeat.inference.dialects.embedded import EmbeddedDialect
from offbeat.inference.hearing import Hearing
from offbeat.inference.sampling import Draws, PromptScore, Sample, Sampling, ScoreRequest
from offbeat.outside import outside
from offbeat.weights.protocol import Interrupt, Manifest, Proof

T = TypeVar("T")

_KEEPALIVE_S = 4.0  # shorter than any server's, so that we never reuse an idle connection that the server is closing
_LARGE_BYTES = 1 << 20
"""Answers above this size are decoded on a thread, because the event loop would stand still for some milliseconds."""
_OWNER = "X-Offbeat-Owner"
_JSON = {"Content-Type": "application/json"}
_REFUSALS = {400: RefusedError, 401: RefusedError, 404: RefusedError, 422: RefusedError, 429: BusyError}


Deliver = Callable[[str, str, float], Awaitable[str]]
"""`deliver(engine, folder, timeout_s)` makes a folder of this machine present on an engine's, and returns its path there.

It raises EngineError or DeadlineError.
"""


async def deliver_nothing(_engine: str, folder: str, _timeout_s: float) -> str:
    """Return the folder as it is, because the engine sees the same files."""
    return folder


class EngineClient:
    """Calls one engine. Implements `weights.protocol.EngineControl`, and `Wire` for its dialect."""

    def __init__(
        self, name: str, url: str, session: aiohttp.ClientSession, *, dialect: Dialect | None = None, api_key: str = "",
        deliver: Deliver = deliver_nothing, clock: HaltingClock | None = None, owner: str = "",
    ) -> None:
        """Call the engine at `url`.

        Args:
            owner: value of the header `engine.inside.owners.HEADER`, such as "sort_digits-3fa9c1 7 exclusive"; empty for a client that
                publishes nothing.
            deliver: makes folders of this machine present on the engine's.
            clock: stands still while the engine sleeps; it counts the time of requests to generate and to score.
        """
        self.name = name
        self.url = url.rstrip("/")
        self._session = session
        self._headers = ({"Authorization": f"Bearer {api_key}"} if api_key else {}) | ({_OWNER: owner} if owner else {})
        self._deliver = deliver
        self._dialect: Dialect = dialect or EmbeddedDialect()
        self._clock = clock
        self._hearings: dict[str, Hearing] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.Task[None] | None = None
        self._tells = True

    async def check(self, *, timeout_s: float) -> None:
        """Return if the engine is ready and meets its dialect's requirements; raises EngineError or DeadlineError if it does not."""
        async with self._asking("check", timeout_s):
            await self._dialect.check(self)

    async def generate(self, prompt: tuple[int, ...], sampling: Sampling, *, n: int, timeout_s: float, adapter: str = "") -> list[Sample]:
        """Generate n continuations of `prompt` with the adapter of that name, or with the base model if `adapter` is empty.

        Raises:
            EngineError: the engine refused, failed or cannot be reached.
            DeadlineError: it did not finish in time; closing the connection aborts the samples.
        """
        async with self._asking("generate", timeout_s, clock=self._clock):
            asking = self._dialect.generate(self, prompt, sampling, n=n, adapter=adapter)
            return await asking if sampling.hearing is None else await self._heard(sampling.hearing, asking, timeout_s=timeout_s)

    async def _heard(self, hearing: Hearing, asking: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
        """Return the result of a request; until then its samples are brought up to date."""
        self._hearings[hearing.name] = hearing
        try:
            if self._timer is None and self._tells:
                self._timer = asyncio.get_running_loop().call_later(hearing.every_s, self._look_again, hearing.every_s, timeout_s)
            return await asking
        finally:
            del self._hearings[hearing.name]
            if not self._hearings and self._look is not None:
                self._look.cancel()

    def _look_again(self, every_s: float, timeout_s: float) -> None:
        """Look at all running requests, and again after a while; one timer for all of them, as most end before it."""
        self._timer = None
        if not self._hearings or not self._tells:
            return
        self._timer = asyncio.get_running_loop().call_later(every_s, self._look_again, every_s, timeout_s)
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._hear_running(timeout_s), name=f"look at {self.name}")

    async def _hear_running(self, timeout_s: float) -> None:
        """Look once. Where that fails, the requests themselves tell what the matter is."""
        try:
            async with self._asking("look", timeout_s):
                await self._dialect.hear_running(self, self._hearings)
        except RefusedError:
            self._tells = False
        except OffbeatError:
            pass

    async def score(
        self, tokens: tuple[int, ...], *, adapter: str = "", top_k: int = 0, targets: tuple[tuple[int, ...], ...] | None = None,
        draws: Draws | None = None, timeout_s: float,
    ) -> PromptScore:
        """Score tokens with the adapter, or the base model if it is ""; see `ScoreRequest` for arguments and `generate` for errors."""
        async with self._asking("score", timeout_s, clock=self._clock):
            return await self._dialect.score(self, ScoreRequest(tokens, top_k, targets, draws), adapter=adapter)

    async def stage(self, manifest: Manifest, *, timeout_s: float) -> None:
        async with self._asking("stage", timeout_s):
            await self._dialect.stage(self, await self._there(manifest, timeout_s=timeout_s))

    async def switch(self, manifest: Manifest, *, interrupt: Interrupt, timeout_s: float) -> None:
        async with self._asking("switch", timeout_s):
            await self._dialect.switch(self, await self._there(manifest, timeout_s=timeout_s), interrupt)

    async def prove(self, canary: tuple[int, ...], *, timeout_s: float, adapter: str = "") -> Proof:
        async with self._asking("prove", timeout_s):
            return await self._dialect.prove(self, canary, adapter=adapter)

    async def sleep(self, *, keep_weights: bool, timeout_s: float) -> None:
        async with self._asking("sleep", timeout_s):
            await self._dialect.sleep(self, keep_weights=keep_weights)

    async def wake(self, *, timeout_s: float) -> None:
        async with self._asking("wake", timeout_s):
            await self._dialect.wake(self)

    async def load_adapter(self, name: str, folder: str, *, timeout_s: float) -> None:
        async with self._asking("load_adapter", timeout_s):
            await self._dialect.load_adapter(self, name, await self._deliver(self.name, folder, timeout_s))

    async def unload_adapter(self, name: str, *, timeout_s: float) -> None:
        async with self._asking("unload_adapter", timeout_s):
            await self._dialect.unload_adapter(self, name)

    async def adapters(self, *, timeout_s: float) -> dict[str, str]:
        async with self._asking("adapters", timeout_s):
            return await self._dialect.adapters(self)

    async def health(self, *, timeout_s: float) -> dict[str, Any]:
        """Return the engine's report about itself; raises unless the engine serves requests."""
        async with self._asking("health", timeout_s):
            return await self._dialect.health(self)

    async def leave(self, owner: str, *, timeout_s: float) -> None:
        """Let the engine know that its owner does not need it any more; see `fleet.owner.leaving`."""
        self._headers = self._headers | {_OWNER: owner}
        await self.health(timeout_s=timeout_s)

    async def resume(self, *, timeout_s: float) -> None:
        async with self._asking("resume", timeout_s):
            await self._dialect.resume(self)

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        data, is_text = await self._exchange(method, path, body)
        if not data:
            return {}
        try:
            answer = await _reading(msgspec.json.decode, data)
        except msgspec.DecodeError as exc:
            if is_text:  # vLLM confirms in plain text, untyped
                return {}
            raise self._no_json(path, data) from exc
        return answer if isinstance(answer, dict) else {}

    async def fetch(self, path: str, body: Mapping[str, Any], read: Callable[[bytes], T]) -> T:
        data, _ = await self._exchange("POST", path, body)
        try:
            return await _reading(read, data)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError as exc:
            raise self._no_json(path, data) from exc

    async def _there(self, manifest: Manifest, *, timeout_s: float) -> Manifest:
        """Return the manifest with its folder as the engine sees it; a broadcast needs no folder."""
        if manifest.broadcast:
            return manifest
        return replace(manifest, folder=await self._deliver(self.name, manifest.folder, timeout_s))

    async def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[bytes, bool]:
        """Return the body of a successful answer, and whether its type is plain text, or not stated."""
        content, headers = (None, self._headers) if body is None else (_encoded(path, body), self._headers | _JSON)
        try:
            async with self._session.request(method, self.url + path, data=content, headers=headers) as response:
                data = await response.read()
        except aiohttp.ClientError as exc:
            raise EngineError(f"{self.name} ({self.url}) cannot be reached: {exc or type(exc).__name__}") from exc
        if response.status != 200:
            said = _message(data)
            error = _REFUSALS.get(response.status, EngineError)(f"{self.name} answered {path} with {response.status}: {said}")
            if isinstance(error, RefusedError):
                error.said = said
            raise error
        return data, response.headers.get("Content-Type", "text/plain").startswith("text/plain")

    def _no_json(self, path: str, data: bytes) -> EngineError:
        return EngineError(f"{self.name} answered {path} with something that is not JSON: {_message(data)}")

    @asynccontextmanager
    async def _asking(self, what: str, timeout_s: float, *, clock: HaltingClock | None = None) -> AsyncIterator[None]:
        """Run the body under a deadline, and report answers that the dialect cannot read as EngineError."""
        try:
            async with deadline(f"{what} on {self.name} ({self.url})", timeout_s, clock=clock):
                yield
        except OffbeatError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, msgspec.ValidationError) as exc:
            reason = f"without {exc}" if isinstance(exc, KeyError) else f"in a form that cannot be read ({type(exc).__name__}: {exc})"
            raise EngineError(
                f"{self.name} ({self.url}) answered {what} {reason}; is it really an engine of kind inference.engine?") from exc


class EngineSession:
    """Holds the HTTP connections of all clients: `async with EngineSession() as http: EngineClient(name, url, http.session)`.

    Engines are asked directly, whatever proxies the environment names, unless `through_proxies` is set.
    """

    session: aiohttp.ClientSession

    def __init__(self, *, through_proxies: bool = False) -> None:
        self._through_proxies = through_proxies

    async def __aenter__(self) -> Self:
        if (given := outside.get()) is not None:
            self.session = given.open_session()
            return self
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        self.session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), trust_env=self._through_proxies)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.session.close()


def _plain(value: object) -> object:
    """Return the JSON form of a NumPy value, which workflows may give as settings, such as 3 for np.int64(3)."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form in JSON")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)


def _encoded(path: str, body: Mapping[str, Any]) -> bytes:
    try:
        return _ENCODER.encode(body)
    except (TypeError, ValueError, OverflowError) as exc:  # the caller's mistake, which no engine has seen
        raise RefusedError(f"a request for {path} cannot be sent: {exc}; give numbers, strings and lists") from exc


async def _reading(read: Callable[[bytes], T], data: bytes) -> T:
    return read(data) if len(data) <= _LARGE_BYTES else await asyncio.to_thread(read, data)


def _message(data: bytes) -> str:
    try:
        error = msgspec.json.decode(data)["error"]
        return error["message"] if isinstance(error, dict) else str(error)
    except (msgspec.DecodeError, KeyError, TypeError):
        return data.decode(errors="replace")[:300]
