"""The engine's HTTP front end on Starlette and uvicorn: its life, who may ask, health, metrics, scores and weight control.

`completion_endpoints`, `chats` and `served_models` serve completions, chats and lists of models. `EngineServer` runs two threads: uvicorn's
event loop and the engine's (`loop`), between which `submissions` carries requests and answers. With a key, every request must carry it;
without one, only programs on this machine are served, and no web page that a browser shows there.
"""

import asyncio
import threading
import time
import uuid
from functools import partial
from pathlib import Path

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from offbeat.chat.dialects import read_body
from offbeat.chat.refusals import Refusal, WriteError, error_response, errors_of, json_response, no_such_endpoint
from offbeat.engine import wire
from offbeat.engine.chats import Chats
from offbeat.engine.completion_endpoints import CompletionEndpoints
from offbeat.engine.inside.owners import HEADER, Owners
from offbeat.engine.loader import load_engine
from offbeat.engine.loop import EngineLoop
from offbeat.engine.metrics import registry_of
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import Event, Scored, ScoreJob
from offbeat.engine.served_models import ServedModels
from offbeat.engine.stall import LOOKED_AT_S, StepWatch
from offbeat.engine.submissions import Submissions, next_message
from offbeat.engine.versions import VersionSource
from offbeat.engine.web import Handler, HttpServer, refusal, refusal_of, whole_body
from offbeat.errors import DeadlineError, EngineError, RefusedError
from offbeat.listening import bind, decode_body, server_config, url_of
from offbeat.types import Version
from offbeat.user_code.boundary import Caught

_KEEP_ALIVE_S = 30


class EngineServer:
    """An engine behind HTTP.

    >>> server = EngineServer(EngineOptions(model="folder"))
    >>> url = server.start()
    >>> server.stop()
    """

    def __init__(self, options: EngineOptions) -> None:
        """Load the model; the server does not listen yet. Raises as `loader.load_engine`."""
        self._options = options
        self._engine = load_engine(options)
        self._loop = EngineLoop(self._engine, deliver=self._deliver)
        self._steps = StepWatch(options.stall_timeout_s)
        self._registry = registry_of(self._engine)
        self._submissions = Submissions(self._loop)
        self._models = ServedModels(self._engine, folder=options.model)
        self._completions = CompletionEndpoints(self._loop, self._submissions, self._models, max_queued=options.max_queued)
        files = Path(options.image_files) if options.image_files else None
        self._chats = Chats(self._engine, self._submissions, self._models, image_files=files)
        self._owners = Owners()
        self._pause_by, self._pause_s = "", 0.0  # who paused the engine, and when
        self._http: HttpServer | None = None
        self._thread: threading.Thread | None = None

    def start(self, *, host: str = "127.0.0.1", port: int = 0, timeout_s: float = 30.0) -> str:
        """Serve from threads of this process; returns the URL. Port 0 takes a free one.

        Raises PortBusyError if the port is taken, DeadlineError if uvicorn did not start in time.
        """
        listener = bind(host, port, who="the engine")
        app = Starlette(routes=self._routes(), exception_handlers={HTTPException: no_such_endpoint})
        self._http = HttpServer(server_config(app, keep_alive_s=_KEEP_ALIVE_S, shutdown_s=2))
        self._thread = threading.Thread(target=self._http.run, args=([listener],), name="offbeat-http", daemon=True)
        self._thread.start()
        if not self._http.ready.wait(timeout_s):
            raise DeadlineError(f"the engine's HTTP server on {host} did not start within {timeout_s:g} s")
        self._loop.start()
        return url_of(listener, host=host)

    def stop(self) -> None:
        """Fail all requests in flight, stop listening and end both threads."""
        if self._http is None or self._thread is None:
            return
        self._loop.stop()
        self._http.should_exit = True
        self._thread.join(10.0)
        self._http = None

    def _deliver(self, events: list[Event]) -> None:
        assert self._http is not None, "the engine starts after the event loop and ends before it"
        self._http.loop.call_soon_threadsafe(self._submissions.dispatch, events)

    def _routes(self) -> list[Route]:
        table: list[tuple[str, str, Handler]] = [
            *self._completions.routes(),
            *self._chats.routes(),
            *self._models.routes(),
            ("GET", "/health", self._health),
            ("GET", "/metrics", self._metrics),
            ("POST", "/v1/weights/stage", self._stage),
            ("POST", "/v1/weights/switch", self._switch),
            ("GET", "/v1/weights/fingerprint", self._fingerprint),
            ("POST", "/v1/weights/prove", self._prove),
            ("POST", "/v1/weights/sleep", self._sleep),
            ("POST", "/v1/weights/wake", self._wake),
            ("POST", "/v1/score", self._score),
            ("POST", "/v1/load_lora_adapter", self._load_adapter),
            ("POST", "/v1/unload_lora_adapter", self._unload_adapter),
            ("POST", "/pause", self._pause),
            ("POST", "/resume", self._resume),
        ]
        return [Route(path, self._guarded(handler, errors_of(path)), methods=[method]) for method, path, handler in table]

    def _guarded(self, handler: Handler, write: WriteError) -> Handler:
        """Check that the client may ask, and turn errors into HTTP answers."""

        async def guarded(http: HttpRequest) -> Response:
            if (refused := refusal(http, self._options.api_key)) is not None:
                return error_response(refused, write)
            if foreign := self._owners.refusal(http.headers.get(HEADER, ""), now_s=time.monotonic()):
                return error_response(Refusal(foreign, 409), write)
            with Caught() as caught:
                return await handler(http)
            return error_response(refusal_of(caught.take()), write)

        return guarded

    async def _health(self, _: HttpRequest) -> Response:
        engine, error = self._engine, self._loop.error
        if error is not None:
            return error_response(Refusal(str(error), 500))
        if stall := self._stall():
            return error_response(Refusal(stall, 500))
        pause = self._pause_by and {"by": self._pause_by, "for_s": round(time.monotonic() - self._pause_s, 3)}
        return json_response(msgspec.json.encode({
            "status": "paused" if engine.paused else "asleep" if engine.asleep else "ok", "paused": pause or None,
            "version": engine.version, "running": engine.num_running, "waiting": engine.num_waiting, "max_context": engine.max_context,
            "max_adapter_rank": self._options.max_adapter_rank}))

    def _stall(self) -> str:
        """Return the fault of the step that the engine is in, as a sentence; empty if there is none."""
        loop, step_s = self._loop, self._loop.round_s
        return self._steps.look(loop.num_rounds, step_s, loop.signs(), now_s=time.monotonic()) if step_s >= LOOKED_AT_S else ""

    async def _metrics(self, _: HttpRequest) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _stage(self, http: HttpRequest) -> Response:
        body = read_body(wire.StageBody, await whole_body(http))
        await asyncio.to_thread(self._loop.hold_version, body.version, VersionSource(body.folder, body.fingerprint), body.broadcast)
        return json_response(msgspec.json.encode({"version": body.version, "folder": body.folder}))

    async def _switch(self, http: HttpRequest) -> Response:
        body = read_body(wire.SwitchBody, await whole_body(http))
        done = await asyncio.wrap_future(self._loop.call(lambda: self._engine.switch(body.version, body.interrupt)))
        switch_s = await asyncio.wrap_future(done)
        return json_response(msgspec.json.encode({"version": body.version, "switch_s": switch_s}))

    async def _fingerprint(self, http: HttpRequest) -> Response:
        version, fingerprint = await self._fingerprint_of(http.query_params.get("adapter", ""))
        return json_response(msgspec.json.encode({"version": version, "fingerprint": fingerprint}))

    async def _prove(self, http: HttpRequest) -> Response:
        body = read_body(wire.ProveBody, await whole_body(http))
        # Ahead of everything that waits, as a proof has a deadline.
        job = ScoreJob(id=f"score-{uuid.uuid4().hex}", tokens=body.tokens, adapter=body.adapter, urgent=True)
        async with self._submissions.submitted(http, job) as inbox:
            version, fingerprint = await self._fingerprint_of(body.adapter)
            scored = await next_message(inbox, Scored)
        if scored.version != version:
            raise EngineError(f"the engine changed between versions {scored.version} and {version} during its proof")
        return json_response(msgspec.json.encode({"version": version, "fingerprint": fingerprint, "logprobs": scored.logprobs}))

    async def _fingerprint_of(self, name: str) -> tuple[Version, str]:
        """Return the version that serves, and the fingerprint of its weights, or of the adapter of that name as it serves."""
        if name:
            version, adapter = await asyncio.wrap_future(self._loop.call(lambda: self._engine.live_adapter(name)))
            return version, await asyncio.to_thread(adapter.fingerprint)
        version, fingerprint = await asyncio.wrap_future(self._loop.call(self._engine.fingerprinter))
        return version, await asyncio.to_thread(fingerprint)

    async def _sleep(self, http: HttpRequest) -> Response:
        body = read_body(wire.SleepBody, await whole_body(http))
        await asyncio.wrap_future(self._loop.call(lambda: self._engine.sleep(keep_weights=body.keep_weights)))
        return json_response(msgspec.json.encode({"status": "asleep"}))

    async def _wake(self, _: HttpRequest) -> Response:
        await asyncio.wrap_future(self._loop.call(self._engine.wake))
        return json_response(msgspec.json.encode({"status": "ok"}))

    async def _score(self, http: HttpRequest) -> Response:
        body = await decode_body(partial(read_body, wire.ScoreBody), await whole_body(http))
        job = ScoreJob(
            id=f"score-{uuid.uuid4().hex}", tokens=body.tokens, top_k=body.top_k, targets=body.targets, draws=body.draws,
            temperature=body.temperature, seed=body.seed, adapter=body.adapter, urgent=body.urgent)
        async with self._submissions.submitted(http, job) as inbox:
            scored = await next_message(inbox, Scored)
        asked = {"top_logprobs": scored.top, "target_logprobs": scored.target_logprobs, "draws": scored.draws}
        return json_response(msgspec.json.encode({
            "version": scored.version, "logprobs": scored.logprobs, **{name: rows for name, rows in asked.items() if rows is not None}}))

    async def _load_adapter(self, http: HttpRequest) -> Response:
        body = read_body(wire.LoadAdapterBody, await whole_body(http))
        if body.lora_name == self._models.own_name:
            raise RefusedError(f"{body.lora_name!r} is the base model's name; give the adapter another")
        await asyncio.to_thread(self._loop.hold_adapter, body.lora_name, body.lora_path)
        return json_response(msgspec.json.encode({"status": "ok"}))

    async def _unload_adapter(self, http: HttpRequest) -> Response:
        body = read_body(wire.UnloadAdapterBody, await whole_body(http))
        await asyncio.wrap_future(self._loop.call(lambda: self._engine.adapters.unload(body.lora_name)))
        return json_response(msgspec.json.encode({"status": "ok"}))

    async def _pause(self, http: HttpRequest) -> Response:
        body = read_body(wire.PauseBody, await whole_body(http))
        self._pause_by, self._pause_s = body.by or (http.client.host if http.client else "somebody"), time.monotonic()
        await asyncio.wrap_future(self._loop.pause(body.mode))
        return json_response(msgspec.json.encode({"status": "paused"}))

    async def _resume(self, _: HttpRequest) -> Response:
        self._pause_by = ""
        await asyncio.wrap_future(self._loop.call(self._engine.resume))
        return json_response(msgspec.json.encode({"status": "ok"}))
