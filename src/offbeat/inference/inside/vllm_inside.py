"""Offbeat's endpoints for weights inside a vLLM server: stage a version, switch to it under running requests, say which one serves.

Runs in vLLM's own processes, from vLLM's own environment, and imports nothing of `offbeat`; only for weights by broadcast it loads
`dist/broadcast.py`, which needs torch alone, from beside itself:

    PYTHONPATH=.../offbeat/inference/inside vllm serve MODEL --middleware vllm_inside.Inside \
        --worker-extension-cls vllm_inside.WorkerExtension --logprobs-mode processed_logprobs

`Inside` lives in the API server and adds routes when it starts; `WorkerExtension` is mixed into vLLM's worker. Each completion then says by
which version every token of it was sampled ("versions"), as the engine's own step loop recorded it. Needs vLLM 0.32 or later.
"""

import asyncio
import dataclasses
import importlib.util
import json
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import vllm
from safetensors import safe_open
from safetensors.torch import save
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

_PAUSES = {"recompute": ("keep", True), "keep": ("keep", False), "drain": ("wait", True)}
"""By `interrupt`: vLLM's mode of pausing, and whether it forgets all cached keys and values, those of running requests included."""
_METHODS = ("pause_generation", "resume_generation", "collective_rpc", "reset_prefix_cache", "update_weight_version", "get_weight_version")
_FIRST_VERSION = int(os.environ.get("OFFBEAT_VERSION", "-1"))
_GENERATING = ("/v1/completions", "/v1/chat/completions", "/health")


class RefusedError(Exception):
    """The request is wrong."""


class Inside:
    """The middleware: it adds routes to the application around it, and stands in front of it while its weights are unusable."""

    def __init__(self, app: Callable[..., Any]) -> None:
        check_interface()
        self._app = app
        self._folders: dict[int, str] = {}
        self._received: dict[int, MemoryFile] = {}
        self._broken = ""
        self._switching = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            self._install(scope["app"])
        elif scope["type"] == "http" and self._broken and scope["path"] in _GENERATING:
            return await _error(self._broken, status=503)(scope, receive, send)
        return await self._app(scope, receive, send)

    def _install(self, app: Any) -> None:
        app.add_route("/v1/weights/stage", self._answer(self._stage), methods=["POST"])
        app.add_route("/v1/weights/switch", self._answer(self._switch), methods=["POST"])
        app.add_route("/v1/weights/fingerprint", self._answer(self._fingerprint), methods=["GET"])
        form = OpenAIServingCompletion.request_output_to_completion_response
        OpenAIServingCompletion.request_output_to_completion_response = with_versions(form)

    def _answer(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(request: Request) -> Response:
            try:
                return JSONResponse(await handler(request.app.state.engine_client, await request.body()))
            except RefusedError as exc:
                return _error(str(exc), status=400)
            except Exception as exc:
                return _error(f"{type(exc).__name__}: {exc}; the server's log says where", status=500)

        return answer

    async def _stage(self, engine: AsyncLLM, body: bytes) -> dict[str, Any]:
        """Check a version, and remember where its weights are; vLLM has no room to hold two sets of them."""
        version, folder, broadcast = read_body(body, version=int, folder=str, broadcast="")
        bound = self._folders.get(version, folder)
        if bound != folder:
            raise RefusedError(f"version {version} is {bound} and cannot become {folder}; a version is immutable, use a new one")
        if broadcast and version not in self._received and (received := await asyncio.to_thread(receive, broadcast)):
            self._received[version] = received
        self._folders[version] = folder
        try:
            await self._check(engine, version)
        except RefusedError:
            del self._folders[version]
            self._received.pop(version, None)
            raise
        return {"version": version, "folder": folder}

    async def _switch(self, engine: AsyncLLM, body: bytes) -> dict[str, Any]:
        """Serve a staged version from the next step on. Requests that come meanwhile wait."""
        version, interrupt = read_body(body, version=int, interrupt="recompute")
        async with self._switching:
            if version == await _live(engine) and not self._broken:
                return {"version": version, "switch_s": 0.0}
            if version not in self._folders:
                raise RefusedError(f"version {version} is not staged; staged are {sorted(self._folders)}")
            if interrupt not in _PAUSES:
                raise RefusedError(f"interrupt is one of {', '.join(_PAUSES)}, got {interrupt!r}")
            mode, clear_cache = _PAUSES[interrupt]
            if not clear_cache and engine.vllm_config.cache_config.enable_prefix_caching:
                raise RefusedError(
                    "vLLM cannot keep the cache of running requests without keeping it for new ones, too; "
                    "start it with --no-enable-prefix-caching, or use recompute or drain")
            await self._check(engine, version)  # a folder may have been removed since
            start = time.monotonic()
            try:
                await engine.pause_generation(mode=mode, clear_cache=clear_cache)
                await self._load(engine, version, reset=clear_cache)
            finally:
                if not self._broken:
                    await self._resume(engine)
            self._folders = {v: folder for v, folder in self._folders.items() if v >= version}
            self._received = {v: file for v, file in self._received.items() if v > version}
            return {"version": version, "switch_s": time.monotonic() - start}

    async def _load(self, engine: AsyncLLM, version: int, *, reset: bool) -> None:
        """Load into the paused engine. If that fails, its weights are neither the old nor the new ones, and nobody gets a token of them."""
        try:
            await engine.collective_rpc("offbeat_load", args=([str(path) for path in self._files(version)],))
            if reset:
                await engine.reset_prefix_cache()
            await engine.update_weight_version(str(version))
        except BaseException as exc:  # a handler that is cancelled leaves them half-way, too
            self._broken = (
                f"loading version {version} failed half-way and nothing can be sampled before another one is switched to: "
                f"{str(exc) or type(exc).__name__}")
            await engine.pause_generation(mode="abort")
            raise
        self._broken = ""

    async def _resume(self, engine: AsyncLLM) -> None:
        try:
            await engine.resume_generation()
        except BaseException as exc:  # also of a version that is loaded: the next switch to it has to try again
            self._broken = f"it is paused for a switch and could not be resumed; switch again: {str(exc) or type(exc).__name__}"
            raise

    async def _check(self, engine: AsyncLLM, version: int) -> None:
        config, name = engine.model_config, self._folders[version]
        tied = bool(getattr(config.hf_config, "tie_word_embeddings", False))
        await asyncio.to_thread(check_weights, self._files(version), name, config.model, tied=tied)

    def _files(self, version: int) -> list[Path]:
        received = self._received.get(version)
        return [received.path] if received else files_of(self._folders[version])

    async def _fingerprint(self, engine: AsyncLLM, _body: bytes) -> dict[str, Any]:
        """The version that serves; its weights are packed for the kernels and cannot be hashed."""
        return {"version": await _live(engine), "fingerprint": None}


class WorkerExtension:
    """What vLLM's worker can do beside its own methods."""

    model_runner: Any

    def offbeat_load(self, files: list[str]) -> None:
        """Load safetensors files over the weights that are there, on this worker's accelerator or CPU."""
        self.model_runner.reload_weights(weights_iterator=read_files(files))
        if current_platform.is_cpu():
            repack_heads(self.model_runner.get_model())


def repack_heads(model: torch.nn.Module) -> None:
    """Pack the output head for the CPU's kernels again: a reload leaves a tied head with its packed copy of the old weights."""
    # Only vLLM for CPUs has these.
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # noqa: PLC0415
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding  # noqa: PLC0415

    embedding = next(module for module in model.modules() if type(module) is VocabParallelEmbedding)
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
                module.weight = embedding.weight
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class MemoryFile:
    """A safetensors file in this process's memory, for its workers; it is gone with this object, or with the process.

    Attributes:
        path: by which other processes of this user open it.
    """

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._descriptor = os.memfd_create("offbeat-weights")
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        with os.fdopen(self._descriptor, "wb", closefd=False) as file:
            file.write(save(tensors))

    def __del__(self) -> None:
        os.close(self._descriptor)


def receive(address: str) -> MemoryFile | None:
    """What is offered at `host:port`; None where it is to be read from the version's folder.

    Raises:
        RefusedError: this file is not in its place.
    """
    path = Path(__file__).parents[2] / "dist" / "broadcast.py"
    if not path.exists():
        raise RefusedError(f"weights by broadcast need Offbeat's own {path}; put its folder inference/inside on PYTHONPATH, not a copy")
    if "offbeat_broadcast" not in sys.modules:
        spec = importlib.util.spec_from_file_location("offbeat_broadcast", path)
        assert spec is not None and spec.loader is not None, "it is a Python file"
        sys.modules["offbeat_broadcast"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["offbeat_broadcast"])
    tensors = sys.modules["offbeat_broadcast"].receive(address, device=torch.device("cpu"))
    return None if tensors is None else MemoryFile(tensors)


def files_of(folder: str) -> list[Path]:
    """The safetensors files of a folder."""
    return sorted(Path(folder).glob("*.safetensors"))


def read_files(files: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by name; the files are mapped, not copied."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)


def check_weights(files: list[Path], name: str, model: str, *, tied: bool) -> None:
    """
    Raises:
        RefusedError: the files, of the version's folder `name`, do not hold weights of the same names and shapes as the model.
    """
    if not (own := read_shapes(files)):
        raise RefusedError(f"{name} holds no *.safetensors file that can be read here")
    wanted = read_shapes(files_of(model))  # {} where the model is a hub's, whose weights lie in a cache
    if tied:
        for shapes in (own, wanted):
            shapes.pop("lm_head.weight", None)
    for tensor in sorted(wanted.keys() | own.keys()) if wanted else ():
        if wanted.get(tensor) != own.get(tensor):
            there, here = own.get(tensor, "missing"), wanted.get(tensor, "missing")
            raise RefusedError(f"{name} is another model than {model}: {tensor} is {there} there, {here} here")


def read_shapes(files: list[Path]) -> dict[str, list[int]]:
    """Of every tensor in safetensors files, from their headers.

    Raises:
        RefusedError: a file is no whole safetensors file.
    """
    shapes: dict[str, list[int]] = {}
    for path in files:
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(size, path.stat().st_size)))
            header.pop("__metadata__", None)
            if 8 + size + max(entry["data_offsets"][1] for entry in header.values()) != path.stat().st_size:
                raise ValueError("its end is missing")
            shapes |= {name: entry["shape"] for name, entry in header.items()}
        except (OSError, ValueError, KeyError, TypeError, struct.error) as exc:
            raise RefusedError(f"{path} is no whole safetensors file: {exc}") from exc
    return shapes


def read_body(body: bytes, **fields: Any) -> list[Any]:
    """A JSON object's fields, in order: for each its type, or its default.

    Raises:
        RefusedError: one is missing or of another type.
    """
    try:
        given = json.loads(body)
    except ValueError as exc:
        raise RefusedError(f"the request is no JSON: {exc}") from exc
    values = []
    for name, wanted in fields.items():
        kind = wanted if isinstance(wanted, type) else type(wanted)
        value = given.get(name, wanted) if isinstance(given, dict) else None
        if type(value) is not kind:
            raise RefusedError(f"the request wants a JSON object with {name}, a {kind.__name__}, got {str(given)[:200]}")
        values.append(value)
    return values


def with_versions(form: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's function that forms an answer, with the version of each token in it."""

    @wraps(form)
    def formed(self: Any, results: list[Any], *args: Any, **kwargs: Any) -> Any:
        response = form(self, results, *args, **kwargs)
        samples = [sample for result in results for sample in result.outputs]
        for choice, sample in zip(response.choices, samples, strict=True):
            spans = sample.weight_versions or ()
            choice.versions = [_number(span.version) for span in spans for _ in range(span.start, span.end)]
        return response

    return formed


def check_interface() -> None:
    """
    Raises:
        RuntimeError: this version of vLLM lacks what is used here.
    """
    missing = [f"AsyncLLM.{name}" for name in _METHODS if not hasattr(AsyncLLM, name)]
    if "weight_versions" not in {field.name for field in dataclasses.fields(CompletionOutput)}:
        missing.append("CompletionOutput.weight_versions")
    if not hasattr(OpenAIServingCompletion, "request_output_to_completion_response"):
        missing.append("OpenAIServingCompletion.request_output_to_completion_response")
    if missing:
        raise RuntimeError(f"vLLM {vllm.__version__} has no {', '.join(missing)}, which Offbeat needs; use vLLM 0.32 or later")


async def _live(engine: AsyncLLM) -> int:
    return _number(await engine.get_weight_version())


def _number(version: str) -> int:
    """vLLM calls what it was started with "default"."""
    return _FIRST_VERSION if version == "default" else int(version)


def _error(message: str, *, status: int) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
