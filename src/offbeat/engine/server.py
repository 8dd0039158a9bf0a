"""The engine's HTTP front end: OpenAI's completions, weight control and metrics, on Starlette and uvicorn; `chats` serves chats.

`EngineServer` runs two threads: uvicorn's event loop and the engine's (`loop`). A request handler submits and then waits on a queue of its
own, which the engine's events reach in one hop per step. When a client disconnects, its samples are aborted. With a key, every request
must carry it; without one, only programs on this machine are served, and no web page that a browser shows there.
"""

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from offbeat.aio import deadline
from offbeat.chat.dialects import list_models, model_entry, read_body
from offbeat.chat.refusals import Refusal, WriteError, error_response, errors_of, json_response, no_such_endpoint
from offbeat.chat.size import check_text_size
from offbeat.engine.adapters import MAX_NAME, UnknownAdapterError
from offbeat.engine.answers import Answer, CompletionFormat, Prompt, write_running
from offbeat.engine.chats import Chats, streaming
from offbeat.engine.inside.owners import HEADER, Owners
from offbeat.engine.loader import load_engine
from offbeat.engine.loop import EngineLoop
from offbeat.engine.metrics import registry_of
from offbeat.engine.options import EngineOptions
from offbeat.engine.request import MAX_PROMPT_TOP, Event, FinishReason, Output, Request, SamplingParams, Scored, ScoreJob
from offbeat.engine.stall import LOOKED_AT_S, StepWatch
from offbeat.engine.text import TextStream
from offbeat.engine.versions import VersionSource
from offbeat.engine.web import Disconnected, Handler, HttpServer, refusal, refusal_of, whole_body
from offbeat.engine.wire import (
    CompletionBody,
    LoadAdapterBody,
    PauseBody,
    ProveBody,
    RunningBody,
    ScoreBody,
    SleepBody,
    StageBody,
    SwitchBody,
    UnloadAdapterBody,
    read_completion,
)
from offbeat.errors import DeadlineError, EngineError, RefusedError
from offbeat.listening import bind, decode_body, server_config, url_of
from offbeat.types import Version
from offbeat.user_code.boundary import Caught

T = TypeVar("T")

DEFAULT_MAX_TOKENS = 16
_KEEP_ALIVE_S = 30
_COMPILE_TIMEOUT_S = 30.0
_MAX_NAMES = 8
"""Number of adapters named in the error for an unknown model."""

Inbox = asyncio.Queue[Output | Scored | EngineError | Disconnected]
"""Messages of the engine to one request."""


class EngineServer:
    """An engine behind HTTP.

    >>> server = EngineServer(EngineOptions(model="folder"))
    >>> url = server.start()
    >>> server.stop()
    """

    def __init__(self, options: EngineOptions) -> None:
        """Load the model; the server does not listen yet.

        Raises:
            ModelError: see `loader.load_engine`.
        """
        self._options = options
        self._model_name = Path(options.model).name
        self._engine = load_engine(options)
        self._tokenizer = self._engine.tokenizer
        self._loop = EngineLoop(self._engine, deliver=self._deliver)
        self._steps = StepWatch(options.stall_timeout_s)
        self._registry = registry_of(self._engine)
        self._chats = Chats(self._engine, self, model_name=self._model_name)
        self._inboxes: dict[str, _Numbered] = {}
        self._owners = Owners()
        self._started = time.time()
        self._pause_by, self._pause_s = "", 0.0  # who paused the engine, and when
        self._http: HttpServer | None = None
        self._thread: threading.Thread | None = None

    # -- life --------------------------------------------------------------------------------------------------------------------------

    def start(self, *, host: str = "127.0.0.1", port: int = 0, timeout_s: float = 30.0) -> str:
        """Listen and serve from threads of this process; port 0 chooses a free one. Returns the URL.

        Raises:
            PortBusyError: the port is taken.
            DeadlineError: uvicorn did not start in time.
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
        self._http.loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            inbox = self._inboxes.get(event.request_id)
            if inbox is not None:
                inbox.put_nowait(event.result)

    # -- routes ------------------------------------------------------------------------------------------------------------------------

    def _routes(self) -> list[Route]:
        table: list[tuple[str, str, Handler]] = [
            ("POST", "/v1/completions", self._completions),
            *self._chats.routes(),
            ("POST", "/v1/running", self._running),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{name:path}", self._model),
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

    async def _completions(self, http: HttpRequest) -> Response:
        body = await decode_body(read_completion, await whole_body(http))
        if len(given := body.prompts) > self._options.max_queued:
            raise RefusedError(f"prompt takes at most {self._options.max_queued} prompts here, got {len(given)}; send several requests")
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        for text in texts:
            check_text_size(text, self._tokenizer, context=self._engine.max_context)
        tokenized = iter(await asyncio.to_thread(lambda: list(map(self._tokenizer.prompt, texts)))) if texts else iter(())
        prompts = [next(tokenized) if isinstance(prompt, str) else prompt for prompt in given]
        ended = self._ended(body, prompts[0]) if body.begun_tokens else None
        generates = ended is None and not (body.echo and body.max_tokens == 0)
        params = body.params(default_max_tokens=DEFAULT_MAX_TOKENS) if generates else SamplingParams()
        form, adapter = CompletionFormat(packed=body.encoding_format == "base64"), self.adapter_of(body.model or "")
        name = f"{form.prefix}-{body.request_id or uuid.uuid4().hex}"
        if f"{name}-0" in self._inboxes:
            raise RefusedError(f"request_id {body.request_id!r} is that of a request that runs; give each one its own")
        requests = [
            Request(id=f"{name}-{index}", prompt=prompt, params=params, n=body.n, adapter=adapter, stream=body.stream,
                    num_begun=body.begun_tokens)
            for index, prompt in enumerate(prompts)]
        scores = await self._prompt_scores(http, body, prompts, adapter)
        answer = Answer(
            name, form, body, tokenizer=self._tokenizer, model=adapter or self._model_name, prompt_len=sum(map(len, prompts)),
            prompts=[Prompt(*prompt) for prompt in zip(prompts, body.prompts, scores, strict=True)])
        outputs = self.outputs(http, *requests) if generates else _empty_samples(len(prompts) * body.n, ended or "length")
        if body.stream:
            return await streaming(answer, outputs)
        made = [output async for output in outputs]
        # A long prompt's log-probabilities take a second to write.
        return json_response(await asyncio.to_thread(answer.whole, made) if any(scores) else answer.whole(made))

    def _ended(self, body: CompletionBody, prompt: list[int]) -> FinishReason | None:
        """Return why the sample that a request is to go on with has ended already, so that its end is not drawn a second time."""
        begun = prompt[-body.begun_tokens :]
        stop_ids = (*(body.stop_token_ids or ()), *(() if body.ignore_eos else (self._tokenizer.eos_token_id,)))
        text = TextStream(self._tokenizer, body.stops, after=self._tokenizer.anchor)
        if body.stops:
            text.begin(begun)
        return "stop" if begun[-1] in stop_ids or text.stopped else "length" if body.max_tokens == 0 else None

    async def _running(self, http: HttpRequest) -> Response:
        """Tell what samples of running requests have, also those of them that have ended."""
        body = read_body(RunningBody, await whole_body(http))
        ids = {f"{CompletionFormat.prefix}-{name}-0": name for name in body.requests}
        have = {request_id: body.requests[name] for request_id, name in ids.items()}
        running = await asyncio.wrap_future(self._loop.call(lambda: self._engine.running(have)))
        told: dict[str, list[tuple[int, Output]]] = {}
        for request_id, outputs in running.items():
            firsts, inbox = have[request_id], self._inboxes.get(request_id)
            ended = [] if inbox is None else [_from(output, firsts[output.index : output.index + 1]) for output in inbox.ended]
            samples = {output.index: output for output in (*outputs, *ended)}
            if samples.keys() == set(range(len(firsts))):
                told[ids[request_id]] = [(first, samples[index]) for index, first in enumerate(firsts)]
        return json_response(write_running(told))

    async def _prompt_scores(
        self, http: HttpRequest, body: CompletionBody, prompts: Sequence[list[int]], adapter: str
    ) -> list[Scored | None]:
        """Score the prompts whose log-probabilities are wanted; None where they are not, and for a prompt of one token."""
        scores: list[Scored | None] = [None] * len(prompts)
        if (top_k := body.prompt_top) is None:
            return scores
        if not 0 <= top_k <= MAX_PROMPT_TOP:
            raise RefusedError(f"logprobs and prompt_logprobs of a prompt must be 0 to {MAX_PROMPT_TOP} likeliest tokens, got {top_k}")
        places = [at for at, prompt in enumerate(prompts) if len(prompt) > 1]
        jobs = [ScoreJob(id=f"score-{uuid.uuid4().hex}", tokens=prompts[at], top_k=top_k, adapter=adapter) for at in places]
        if jobs:
            async with self._submitted(http, *jobs) as inbox:
                for _ in jobs:  # they share forward passes, and come in any order
                    scored = await _next(inbox, Scored)
                    scores[places[scored.index]] = scored
        return scores

    def adapter_of(self, model: str) -> str:
        """Return the adapter that a request's `model` names; empty for the base model, which its folder's name, its path and "" name.

        Raises:
            UnknownAdapterError: nothing here has that name.
        """
        if model in ("", self._model_name, self._options.model):
            return ""
        if model not in (names := self._engine.adapters.names) and "@" not in model:  # the engine says which adapters are gone
            served = ", ".join(map(repr, [self._model_name, *sorted(names)[:_MAX_NAMES]]))
            raise UnknownAdapterError(
                f"no model is called {model[:MAX_NAME]!r} here; this engine serves {served}; leave model out for the first")
        return model

    async def outputs(self, http: HttpRequest, *requests: Request) -> AsyncGenerator[Output]:
        """Run requests; yields their outputs until all samples are done, and aborts them if the caller stops early.

        Samples are numbered through all requests, such as 0, 1 of the first and 2, 3 of the second for n = 2.

        Raises:
            EngineError: the engine refused one or failed.
            Disconnected: the client disconnected.
        """
        requests = await self._with_grammars(requests)
        unfinished = sum(request.n for request in requests)
        async with self._submitted(http, *requests) as inbox:
            while unfinished:
                output = await _next(inbox, Output)
                unfinished -= output.finish_reason is not None
                yield output

    async def _with_grammars(self, requests: Sequence[Request]) -> tuple[Request, ...]:
        """Compile the structure that the requests of one body share, on a thread beside the engine's."""
        structure = requests[0].params.shaping.structure
        if structure is None:
            return tuple(requests)
        async with deadline("the structure of an answer to be compiled", _COMPILE_TIMEOUT_S):
            grammar = await asyncio.to_thread(self._engine.grammars.compile, structure)
        return tuple(replace(request, grammar=grammar) for request in requests)

    @asynccontextmanager
    async def _submitted(self, http: HttpRequest, *requests: Request | ScoreJob) -> AsyncIterator[Inbox]:
        """Submit the requests of one body and give their inbox to the caller's; one that ends with an exception aborts all of them."""
        inbox: Inbox = asyncio.Queue()
        first = 0
        for request in requests:
            self._inboxes[request.id] = _Numbered(inbox, first)
            first += request.n if isinstance(request, Request) else 1
        watch = asyncio.create_task(self._watch(http, inbox, requests), name=f"disconnect of {requests[0].id}")
        for request in requests:
            self._loop.submit(request)
        try:
            yield inbox
        except BaseException:
            self._abort(requests)
            raise
        finally:
            watch.cancel()
            for request in requests:
                del self._inboxes[request.id]

    async def _watch(self, http: HttpRequest, inbox: Inbox, requests: Sequence[Request | ScoreJob]) -> None:
        """Abort requests as soon as their client disconnects; their handler may be busy sending, or waiting for the next output."""
        while (await http.receive())["type"] != "http.disconnect":
            pass
        self._abort(requests)
        inbox.put_nowait(Disconnected())

    def _abort(self, requests: Sequence[Request | ScoreJob]) -> None:
        for request in requests:
            self._loop.abort(request.id)

    async def _models(self, _: HttpRequest) -> Response:
        models = self._described()
        return json_response(list_models(dict.fromkeys(models, self._started), models))

    async def _model(self, http: HttpRequest) -> Response:
        name = self.adapter_of(http.path_params["name"]) or self._model_name
        if (more := self._described().get(name)) is None:
            raise UnknownAdapterError(f"no model is called {name[:MAX_NAME]!r} here; GET /v1/models lists them")
        return json_response(msgspec.json.encode({**model_entry(name, self._started), **more}))

    def _described(self) -> dict[str, dict[str, Any]]:
        """Fields of each model's entry besides its name: the model itself first, then the loaded adapters."""
        size = {"max_model_len": self._engine.max_context}
        adapters = {
            name: {**size, "parent": self._model_name, "root": folder} for name, folder in self._engine.adapters.folders.items()}
        return {self._model_name: size, **adapters}

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

    # -- control -----------------------------------------------------------------------------------------------------------------------

    async def _stage(self, http: HttpRequest) -> Response:
        body = read_body(StageBody, await whole_body(http))
        await asyncio.to_thread(self._loop.hold_version, body.version, VersionSource(body.folder, body.fingerprint), body.broadcast)
        return json_response(msgspec.json.encode({"version": body.version, "folder": body.folder}))

    async def _switch(self, http: HttpRequest) -> Response:
        body = read_body(SwitchBody, await whole_body(http))
        done = await asyncio.wrap_future(self._loop.call(lambda: self._engine.switch(body.version, body.interrupt)))
        switch_s = await asyncio.wrap_future(done)
        return json_response(msgspec.json.encode({"version": body.version, "switch_s": switch_s}))

    async def _fingerprint(self, http: HttpRequest) -> Response:
        version, fingerprint = await self._fingerprint_of(http.query_params.get("adapter", ""))
        return json_response(msgspec.json.encode({"version": version, "fingerprint": fingerprint}))

    async def _prove(self, http: HttpRequest) -> Response:
        body = read_body(ProveBody, await whole_body(http))
        # Ahead of everything that waits, as a proof has a deadline.
        job = ScoreJob(id=f"score-{uuid.uuid4().hex}", tokens=body.tokens, adapter=body.adapter, urgent=True)
        async with self._submitted(http, job) as inbox:
            version, fingerprint = await self._fingerprint_of(body.adapter)
            scored = await _next(inbox, Scored)
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
        body = read_body(SleepBody, await whole_body(http))
        await asyncio.wrap_future(self._loop.call(lambda: self._engine.sleep(keep_weights=body.keep_weights)))
        return json_response(msgspec.json.encode({"status": "asleep"}))

    async def _wake(self, _: HttpRequest) -> Response:
        await asyncio.wrap_future(self._loop.call(self._engine.wake))
        return json_response(msgspec.json.encode({"status": "ok"}))

    async def _score(self, http: HttpRequest) -> Response:
        body = await decode_body(partial(read_body, ScoreBody), await whole_body(http))
        job = ScoreJob(
            id=f"score-{uuid.uuid4().hex}", tokens=body.tokens, top_k=body.top_k, targets=body.targets, draws=body.draws,
            temperature=body.temperature, seed=body.seed, adapter=body.adapter, urgent=body.urgent)
        async with self._submitted(http, job) as inbox:
            scored = await _next(inbox, Scored)
        answer: dict[str, Any] = {"version": scored.version, "logprobs": scored.logprobs}
        if scored.top is not None:
            answer["top_logprobs"] = scored.top
        if scored.target_logprobs is not None:
            answer["target_logprobs"] = scored.target_logprobs
        if scored.draws is not None:
            answer["draws"] = scored.draws
        return json_response(msgspec.json.encode(answer))

    async def _load_adapter(self, http: HttpRequest) -> Response:
        body = read_body(LoadAdapterBody, await whole_body(http))
        if body.lora_name == self._model_name:
            raise RefusedError(f"{body.lora_name!r} is the base model's name; give the adapter another")
        await asyncio.to_thread(self._loop.hold_adapter, body.lora_name, body.lora_path)
        return json_response(msgspec.json.encode({"status": "ok"}))

    async def _unload_adapter(self, http: HttpRequest) -> Response:
        body = read_body(UnloadAdapterBody, await whole_body(http))
        await asyncio.wrap_future(self._loop.call(lambda: self._engine.adapters.unload(body.lora_name)))
        return json_response(msgspec.json.encode({"status": "ok"}))

    async def _pause(self, http: HttpRequest) -> Response:
        body = read_body(PauseBody, await whole_body(http))
        self._pause_by, self._pause_s = body.by or (http.client.host if http.client else "somebody"), time.monotonic()
        await asyncio.wrap_future(self._loop.pause(body.mode))
        return json_response(msgspec.json.encode({"status": "paused"}))

    async def _resume(self, _: HttpRequest) -> Response:
        self._pause_by = ""
        await asyncio.wrap_future(self._loop.call(self._engine.resume))
        return json_response(msgspec.json.encode({"status": "ok"}))


@dataclass(frozen=True)
class _Numbered:
    """Puts the engine's events of one request into an inbox, with its samples numbered from `first` on, and keeps those that have ended."""

    inbox: Inbox
    first: int
    ended: list[Output] = field(default_factory=list)

    def put_nowait(self, result: Output | Scored | EngineError) -> None:
        if isinstance(result, Output) and result.finish_reason is not None:
            self.ended.append(result)
        if self.first and not isinstance(result, EngineError):
            result = replace(result, index=result.index + self.first)
        self.inbox.put_nowait(result)


def _from(output: Output, firsts: Sequence[int]) -> Output:
    first = sum(firsts)
    return replace(output, token_ids=output.token_ids[first:], logprobs=output.logprobs[first:], versions=output.versions[first:])


async def _empty_samples(num: int, reason: FinishReason) -> AsyncGenerator[Output]:
    """Yield samples of no tokens, for prompts that are told again and not continued."""
    for index in range(num):
        yield Output(index, [], [], [], reason, [])


async def _next(inbox: Inbox, kind: type[T]) -> T:
    """Wait for the next message; raises it if it is an error."""
    result = await inbox.get()
    if isinstance(result, Exception):
        raise result
    assert isinstance(result, kind), "the engine answers what it was asked"
    return result
