"""One engine over HTTP: generation for rollouts, control for the publisher."""

import json
from typing import Any, Self

import aiohttp

from offbeat.aio import deadline
from offbeat.errors import BusyError, EngineError, RefusedError
from offbeat.inference.dialects import EmbeddedDialect, Request, Sample, Sampling
from offbeat.types import Version
from offbeat.weights.protocol import Interrupt, Manifest, Proof

_KEEPALIVE_S = 4.0  # shorter than any server's: a reused idle connection must not be one that the server is closing
_REFUSALS = {400: RefusedError, 401: RefusedError, 404: RefusedError, 422: RefusedError, 429: BusyError}


class EngineClient:
    """Calls one engine. Implements `weights.protocol.EngineControl`."""

    def __init__(self, name: str, url: str, session: aiohttp.ClientSession, *, api_key: str = "") -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._session = session
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._dialect = EmbeddedDialect()

    async def generate(self, prompt: tuple[int, ...], sampling: Sampling, *, n: int, timeout_s: float) -> list[Sample]:
        """n continuations of `prompt`.

        Raises:
            EngineError: the engine refused, failed or cannot be reached.
            DeadlineError: it did not finish in time; closing the connection aborts the samples.
        """
        answer = await self._call(self._dialect.generate(prompt, sampling, n=n), timeout_s=timeout_s)
        return self._dialect.samples(answer)

    async def stage(self, manifest: Manifest, *, timeout_s: float) -> None:
        await self._call(self._dialect.stage(manifest), timeout_s=timeout_s)

    async def switch(self, version: Version, *, interrupt: Interrupt, timeout_s: float) -> None:
        await self._call(self._dialect.switch(version, interrupt), timeout_s=timeout_s)

    async def prove(self, canary: tuple[int, ...], *, timeout_s: float) -> Proof:
        fingerprint = await self._call(self._dialect.fingerprint(), timeout_s=timeout_s)
        score = await self._call(self._dialect.score(canary), timeout_s=timeout_s)
        if fingerprint["version"] != score["version"]:
            raise EngineError(f"{self.name} changed from version {fingerprint['version']} to {score['version']} during its proof")
        return Proof(fingerprint["version"], fingerprint["fingerprint"], sum(score["logprobs"]) / len(score["logprobs"]))

    async def health(self, *, timeout_s: float) -> dict[str, Any]:
        """Status, version, running and waiting counts."""
        return await self._call(self._dialect.health(), timeout_s=timeout_s)

    async def _call(self, request: Request, *, timeout_s: float) -> dict[str, Any]:
        try:
            async with deadline(f"{request.path} on {self.name} ({self.url})", timeout_s):
                url = self.url + request.path
                async with self._session.request(request.method, url, json=request.body, headers=self._headers) as response:
                    data = await response.read()
        except aiohttp.ClientError as exc:
            raise EngineError(f"{self.name} ({self.url}) cannot be reached: {exc or type(exc).__name__}") from exc
        if response.status != 200:
            error = _REFUSALS.get(response.status, EngineError)
            raise error(f"{self.name} answered {request.path} with {response.status}: {_message(data)}")
        try:
            return json.loads(data)
        except ValueError as exc:
            raise EngineError(f"{self.name} answered {request.path} with something that is not JSON: {_message(data)}") from exc


class EngineSession:
    """The connections of all clients: `async with EngineSession() as http: EngineClient(name, url, http.session)`."""

    session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        self.session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.session.close()


def _message(data: bytes) -> str:
    try:
        error = json.loads(data)["error"]
        return error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        return data.decode(errors="replace")[:300]
