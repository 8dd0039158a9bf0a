"""Offbeat's endpoints inside a vLLM server: stage a version, switch to it under running requests, prove which one serves, and sleep.

Runs in vLLM's own processes and environment, and imports nothing of `offbeat` except its neighbours in this folder:

    PYTHONPATH=.../offbeat/engine/inside vllm serve MODEL --middleware vllm_inside.Inside \
        --worker-extension-cls vllm_inside.WorkerExtension --logprobs-mode processed_logprobs

`Inside` lives in the API server and adds routes when it starts; `WorkerExtension` is mixed into vLLM's workers (`vllm_worker`). With
VLLM_API_KEY set every path requires that key (`vllm_guard`); OFFBEAT_IMAGES names the folder of images that prompts may have
(`vllm_images`). Each completion reports the version that sampled each token ("versions"), as recorded by the engine's step loop. After a
switch the canary of the proof is queued before the server resumes, ahead of waiting requests (`vllm_canary`). Needs vLLM 0.32 or later.
"""

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import vllm
from owners import HEADER, Owners
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm_canary import Canary, priority_of, read_version
from vllm_files import RefusedError, check_weights, files_of, fingerprint_files
from vllm_guard import may_enter, refuse
from vllm_images import give_images
from vllm_sleep import check_sleep
from vllm_weights import Weights, obtain
from vllm_worker import WorkerExtension as WorkerExtension  # vLLM finds it here
from vllm_worker import read_answers

_PAUSES = {"recompute": ("keep", True), "keep": ("keep", False), "drain": ("wait", True)}
"""For each `interrupt`: vLLM's pause mode, and whether all cached keys and values are dropped, also of running requests."""
_METHODS = (
    "pause_generation", "resume_generation", "is_paused", "collective_rpc", "reset_prefix_cache", "update_weight_version",
    "reset_encoder_cache", "get_weight_version", "add_request", "sleep", "wake_up")
_KEY = os.environ.get("VLLM_API_KEY", "")
_IMAGES = os.environ.get("OFFBEAT_IMAGES", "")
_GENERATING = ("/v1/completions", "/v1/chat/completions", "/health")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The version being served, as far as it is known.

    Attributes:
        num_unread: number of tensors that could not be read back.
        weights: the weights that were read, for comparisons and to apply changes to; None if they were received and are no longer there.
    """

    version: int
    fingerprint: str
    num_unread: int
    weights: Weights | None


class Inside:
    """The middleware: it adds routes to the application, and blocks generation while the weights are unusable."""

    def __init__(self, app: Callable[..., Any]) -> None:
        check_interface()
        self._app = app
        self._staged: dict[int, Weights] = {}
        self._loaded: Loaded | None = None
        self._adapters: dict[str, str] = {}
        self._state: Any = None
        self._canary: Canary | None = None
        self._broken = ""
        self._asleep = False
        self._dropped = False  # whether it sleeps without weights
        self._switching = asyncio.Lock()
        self._owners = Owners()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            self._install(scope["app"])
        elif not may_enter(scope, _KEY):
            return await refuse(scope, receive, send)
        elif foreign := self._owners.refusal(_header(scope, HEADER), now_s=time.monotonic()):
            return await _error(foreign, status=409)(scope, receive, send)
        elif scope["type"] == "http" and self._broken and scope["path"] in _GENERATING:
            return await _error(self._broken, status=503)(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/v1/load_lora_adapter":
            return await self._load_adapter(scope, receive, send)
        return await self._app(scope, receive, send)

    def _install(self, app: Any) -> None:
        self._state = app.state
        give_images(app.state.engine_client, _IMAGES)
        app.add_route("/v1/weights/stage", self._answering(self._stage), methods=["POST"])
        app.add_route("/v1/weights/switch", self._answering(self._switch), methods=["POST"])
        app.add_route("/v1/weights/prove", self._answering(self._prove), methods=["POST"])
        app.add_route("/v1/weights/fingerprint", self._answering(self._fingerprint), methods=["GET"])
        app.add_route("/v1/weights/adapter", self._answering(self._adapter), methods=["POST"])
        app.add_route("/v1/weights/sleep", self._answering(self._sleep), methods=["POST"])
        app.add_route("/v1/weights/wake", self._answering(self._wake), methods=["POST"])
        app.add_route("/v1/weights/resume", self._answering(self._resume_stranger), methods=["POST"])
        form = OpenAIServingCompletion.request_output_to_completion_response
        OpenAIServingCompletion.request_output_to_completion_response = with_versions(form)

    def _answering(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(request: Request) -> Response:
            try:
                return JSONResponse(await handler(request.app.state.engine_client, await request.body()))
            except RefusedError as exc:
                return _error(str(exc), status=400)
            except Exception as exc:
                return _error(f"{type(exc).__name__}: {exc}; the server's log says where", status=500)

        return answer

    async def _stage(self, engine: AsyncLLM, body: bytes) -> dict[str, Any]:
        """Check a version, and remember where its weights are; vLLM has no room for two sets of them.

        With `keep`, weights in this process's memory stay there while they are served, so that changes can be applied to them.
        """
        version, folder, broadcast, fingerprint, keep = read_body(body, version=int, folder=str, broadcast="", fingerprint="", keep=False)
        known = self._staged.get(version)
        if known is None or (known.folder, known.fingerprint) != (folder, fingerprint):
            self._staged.clear()  # a run stages one version at a time, and each may be a whole model in memory
            held = None if self._loaded is None else self._loaded.weights
            staged = await asyncio.to_thread(obtain, folder, fingerprint, broadcast=broadcast, keep=keep, held=held)
            await self._check(engine, staged)
            self._staged[version] = staged
        return {"version": version, "folder": folder}

    async def _switch(self, engine: AsyncLLM, body: bytes) -> dict[str, Any]:
        """Serve a staged version from the next step on. Requests that arrive during the switch wait."""
        version, interrupt, canary = read_body(body, version=int, interrupt="recompute", canary=[])
        async with self._switching:
            staged = self._staged.get(version)
            if staged is None and version == await _live(engine) and not (self._broken or self._dropped):
                await self._rise(engine)
                return {"version": version, "switch_s": 0.0}
            if staged is None:
                raise RefusedError(f"version {version} is not staged; staged are {sorted(self._staged)}")
            if interrupt not in _PAUSES:
                raise RefusedError(f"interrupt is one of {', '.join(_PAUSES)}, got {interrupt!r}")
            mode, clear_cache = _PAUSES[interrupt]
            if not clear_cache and engine.vllm_config.cache_config.enable_prefix_caching:
                raise RefusedError(
                    "vLLM cannot keep the cache of running requests without keeping it for new ones, too; "
                    "start it with --no-enable-prefix-caching, or use recompute or drain")
            await self._check(engine, staged)  # the folder may have been removed since it was staged
            start = time.monotonic()
            self._canary = None
            try:
                if not self._asleep:
                    await engine.pause_generation(mode=mode, clear_cache=clear_cache)
                await self._load(engine, version, staged, reset=clear_cache)
                if canary:  # queued now, so that it is scheduled first
                    self._canary = await Canary.ask(engine, canary)
            finally:
                if not self._broken:
                    await self._resume(engine)
            self._staged = {}  # a run stages one version at a time; any others were abandoned, perhaps by an earlier run
            return {"version": version, "switch_s": time.monotonic() - start}

    async def _load(self, engine: AsyncLLM, version: int, staged: Weights, *, reset: bool) -> None:
        """Load into the paused engine. If that fails, its weights are neither old nor new, and no client may get tokens from them."""
        try:
            self._loaded = None
            if self._asleep:
                await engine.wake_up(tags=["weights"])  # their memory, into which the weights are loaded now
            told = await _ask_workers(engine, "offbeat_load", [str(path) for path in staged.files], _started_with(engine))
            await engine.reset_encoder_cache()  # features of images, which the workers have dropped with the old weights
            if reset:
                await engine.reset_prefix_cache()
            await engine.update_weight_version(str(version))
            self._loaded = Loaded(version, told[0]["fingerprint"], max(each["num_unread"] for each in told), staged.lasting())
        except BaseException as exc:  # a handler that is cancelled leaves them half loaded, too
            await self._break(engine, f"loading version {version} failed half-way", exc)
            raise
        self._broken, self._dropped = "", False

    async def _sleep(self, engine: AsyncLLM, body: bytes) -> dict[str, Any]:
        """Free the memory of the cache and of the weights until the next switch, or with `keep_weights` until `_wake`; requests wait."""
        (keep_weights,) = read_body(body, keep_weights=False)
        async with self._switching:
            check_sleep(engine, on_cpu=current_platform.is_cpu())
            await _ask_workers(engine, "offbeat_read_back", _started_with(engine))  # as long as there are weights to read
            self._asleep, self._dropped = True, self._dropped or not keep_weights
            await engine.sleep(level=1 if keep_weights else 2, mode="keep")
        return {"status": "asleep"}

    async def _wake(self, engine: AsyncLLM, _body: bytes) -> dict[str, Any]:
        """Go on with the weights that a sleep has kept."""
        async with self._switching:
            if self._dropped:
                raise RefusedError("its weights are gone, because it sleeps without them; stage a version and switch to it")
            await self._rise(engine)
        return {"status": "ok"}

    async def _rise(self, engine: AsyncLLM) -> None:
        """End a sleep that has kept the weights, if there is one."""
        if self._asleep:
            await engine.wake_up()
            self._asleep = False

    async def _break(self, engine: AsyncLLM, what: str, exc: BaseException) -> None:
        """Stop all sampling, because the weights belong to no version."""
        self._broken = f"{what} and nothing can be sampled before another one is switched to: {str(exc) or type(exc).__name__}"
        await engine.pause_generation(mode="abort")

    async def _resume_stranger(self, engine: AsyncLLM, _body: bytes) -> dict[str, Any]:
        """Resume after a pause that was not one of our switches."""
        async with self._switching:
            if not (self._broken or self._asleep):
                await engine.resume_generation()
        return {"status": "ok"}

    async def _resume(self, engine: AsyncLLM) -> None:
        try:
            if self._asleep:
                await engine.wake_up(tags=["kv_cache"])  # which resumes generation, as the weights are there
                self._asleep = False
            else:
                await engine.resume_generation()
        except BaseException as exc:  # even if the version is loaded: the next switch to it must try again
            self._broken = f"it is paused for a switch and could not be resumed; switch again: {str(exc) or type(exc).__name__}"
            raise

    async def _check(self, engine: AsyncLLM, staged: Weights) -> None:
        config = engine.model_config
        tied = bool(getattr(config.hf_config, "tie_word_embeddings", False))
        await asyncio.to_thread(check_weights, staged.files, staged.folder, config.model, tied=tied)

    async def _fingerprint(self, engine: AsyncLLM, _body: bytes) -> dict[str, Any]:
        """Return the version being served and the fingerprint of the weights read for it; null for the server's initial weights."""
        version, loaded = await _live(engine), self._loaded
        told = {"version": version, "fingerprint": None, "num_unread": None}
        if loaded is not None and loaded.version == version:
            told |= {"fingerprint": loaded.fingerprint, "num_unread": loaded.num_unread}
        ours = self._switching.locked() or self._broken or self._asleep
        return told | {"paused": await engine.is_paused() and not ours}  # paused by someone else

    async def _prove(self, engine: AsyncLLM, body: bytes) -> dict[str, Any]:
        """Return the answer of `_fingerprint`, and the canary's log-probabilities under the version being served."""
        (tokens,) = read_body(body, tokens=list)
        canary, self._canary = self._canary, None
        if canary is None or canary.tokens != tokens:
            canary = await Canary.ask(engine, tokens)
        logprobs, version = await canary.collect()
        async with self._switching:
            told = await self._fingerprint(engine, b"")
            if self._loaded is not None and self._loaded.weights is not None:
                await self._compare(engine, self._loaded.version, self._loaded.weights)
        if told["version"] != version:
            raise RuntimeError(f"it changed from version {version} to {told['version']} during its proof")
        return told | {"logprobs": logprobs}

    async def _compare(self, engine: AsyncLLM, version: int, weights: Weights) -> None:
        """Compare the weights in use with their files, while these exist, since they may have changed after loading."""
        try:
            if files := [str(path) for path in weights.files]:
                await _ask_workers(engine, "offbeat_compare", files)
        except Exception as exc:
            await self._break(engine, f"version {version} is no longer what is computed with", exc)
            raise

    async def _adapter(self, engine: AsyncLLM, body: bytes) -> dict[str, Any]:
        """Report on an adapter: `fingerprint` of the folder when the adapter was loaded from it; `wrong`, the tensors in it that the server
        does not compute with; `num_unread`, the number of tensors that cannot be compared, or null if nothing is known; and the `priority`
        that its proofs may use.
        """
        (name,) = read_body(body, name=str)
        answer = {
            "fingerprint": self._adapters.get(name), "priority": priority_of(engine), "wrong": [], "num_unread": None}
        request = getattr(getattr(self._state, "openai_serving_models", None), "lora_requests", {}).get(name)
        if request is not None:
            told = await _ask_workers(engine, "offbeat_adapter", request.lora_int_id, request.lora_path)
            answer |= {"wrong": sorted({tensor for wrong, _ in told for tensor in wrong}), "num_unread": max(len(each) for _, each in told)}
        return answer

    async def _load_adapter(self, scope: Any, receive: Any, send: Any) -> None:
        """Let vLLM load an adapter, and then record the fingerprint of its folder."""
        body = await Request(scope, receive).body()
        statuses: list[int] = []

        async def replay() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def note_start(message: Any) -> None:
            statuses.extend([message["status"]] if message["type"] == "http.response.start" else [])
            if message["type"] == "http.response.start" and statuses == [200]:
                name, folder = read_body(body, lora_name=str, lora_path=str)
                self._adapters[name] = await asyncio.to_thread(fingerprint_files, files_of(folder), dtype=torch.float32)
            await send(message)

        await self._app(scope, replay, note_start)


def _header(scope: Any, name: str) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name.encode()), "")


def read_body(body: bytes, **fields: Any) -> list[Any]:
    """Read the named fields of a JSON object, in order; each is given with its type, or with its default.

    Raises RefusedError if a field is missing or has another type.
    """
    try:
        given = json.loads(body)
    except ValueError as exc:
        raise RefusedError(f"the request is not JSON: {exc}") from exc
    values = []
    for name, wanted in fields.items():
        kind = wanted if isinstance(wanted, type) else type(wanted)
        value = given.get(name, wanted) if isinstance(given, dict) else None
        if type(value) is not kind:
            raise RefusedError(f"the request must be a JSON object with {name}, a {kind.__name__}, got {str(given)[:200]}")
        values.append(value)
    return values


def with_versions(form: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap vLLM's function that builds an answer, so that the answer holds the version of each token."""

    @wraps(form)
    def formed(self: Any, results: list[Any], *args: Any, **kwargs: Any) -> Any:
        response = form(self, results, *args, **kwargs)
        samples = [sample for result in results for sample in result.outputs]
        for choice, sample in zip(response.choices, samples, strict=True):
            spans = sample.weight_versions or ()
            choice.versions = [read_version(span.version) for span in spans for _ in range(span.start, span.end)]
        return response

    return formed


def check_interface() -> None:
    """Raise RuntimeError if this vLLM lacks an interface that is used here."""
    missing = [f"AsyncLLM.{name}" for name in _METHODS if not hasattr(AsyncLLM, name)]
    if "weight_versions" not in {field.name for field in dataclasses.fields(CompletionOutput)}:
        missing.append("CompletionOutput.weight_versions")
    if not hasattr(OpenAIServingCompletion, "request_output_to_completion_response"):
        missing.append("OpenAIServingCompletion.request_output_to_completion_response")
    if missing:
        raise RuntimeError(f"vLLM {vllm.__version__} has no {', '.join(missing)}, which Offbeat needs; use vLLM 0.32 or later")


async def _ask_workers(engine: AsyncLLM, method: str, *args: Any) -> list[Any]:
    """Call a method of all workers, and return their answers. Raises as `read_answers`."""
    return read_answers(await engine.collective_rpc(method, args=args))


def _started_with(engine: AsyncLLM) -> list[str]:
    return [str(path) for path in files_of(engine.model_config.model)]


async def _live(engine: AsyncLLM) -> int:
    return read_version(await engine.get_weight_version())


def _error(message: str, *, status: int) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
