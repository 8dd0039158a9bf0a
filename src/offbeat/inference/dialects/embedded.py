"""Offbeat's own engine: OpenAI's completions with `token_ids`, and a log-probability and a version for every token.

Weights have endpoints of their own; adapters use vLLM's endpoints, and have a fingerprint.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np

from offbeat.errors import EngineError
from offbeat.inference.dialects.base import Wire
from offbeat.inference.dialects.completions import read_running, read_samples
from offbeat.inference.hearing import Hearing
from offbeat.inference.sampling import PromptScore, Sample, Sampling, ScoreRequest, TopTokens
from offbeat.inference.seeds import seed_from
from offbeat.types import Version
from offbeat.weights.adapters import split_adapter_name
from offbeat.weights.protocol import Interrupt, Manifest, Proof


class EmbeddedDialect:
    """Implements `Dialect` for the embedded engine."""

    _model_hint = ""
    _routes_hint = ""
    _unversioned: Version | None = None
    _staging: Mapping[str, Any] = {}
    _named: Mapping[str, Any] = {}

    def __init__(self, *, model: str = "", lora_rank: int = 0) -> None:
        """`model` is the folder that must be served (any if empty); `lora_rank` is the rank of the adapters to come, 0 for none."""
        self._model = model
        self._lora_rank = lora_rank

    async def check(self, wire: Wire) -> None:
        health = await self.health(wire)
        if (most := health["max_adapter_rank"]) < self._lora_rank:
            raise EngineError(
                f"{wire.name} takes adapters of rank <= {most} and model.lora.rank is {self._lora_rank}; start it with --max-adapter-rank "
                f"{self._lora_rank} or more, or set model.lora.rank lower")
        if self._model:
            await self._check_model(wire)

    async def generate(self, wire: Wire, prompt: tuple[int, ...], sampling: Sampling, *, n: int, adapter: str) -> list[Sample]:
        body: dict[str, Any] = {
            "prompt": prompt, "n": n, "max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "top_k": sampling.top_k, "logprobs": sampling.top_logprobs, "return_token_ids": True,
        }
        optional: dict[str, Any] = {
            "stop": sampling.stop, "stop_token_ids": sampling.stop_token_ids, "ignore_eos": sampling.ignore_eos, "model": adapter}
        if (hearing := sampling.hearing) is not None:
            optional |= {"request_id": hearing.name, "begun_tokens": hearing.num_begun}
        body |= {name: value for name, value in optional.items() if value}
        if sampling.seed is not None:
            body["seed"] = self._seed(sampling.seed, sampling.first_sample)
        read = partial(read_samples, adapter=adapter, num_top=sampling.top_logprobs, unversioned=self._unversioned)
        asked = {**self._named, **body, **sampling.shaping.fields(), **self._reporting(sampling)}
        samples = await wire.fetch("/v1/completions", asked, read)
        if sampling.routes:
            self._check_routes(wire, samples, num_prompt=len(prompt))
        if sampling.asks_supports:
            _check_supports(wire, samples)
        return samples

    async def hear_running(self, wire: Wire, hearings: Mapping[str, Hearing]) -> None:
        have = {name: [len(each.tokens) - hearing.num_begun for each in hearing.samples] for name, hearing in hearings.items()}
        told = await wire.fetch("/v1/running", {"requests": have}, read_running)
        for name, running in told.items():
            if (hearing := hearings.get(name)) is None:
                continue  # it has been answered meanwhile
            for sample, new in zip(hearing.samples, running, strict=True):
                tokens, logprobs, versions = new.columns()
                own = versions if hearing.version is None else np.full(len(tokens), hearing.version, np.int32)
                sample.hear(new.first + hearing.num_begun, tokens, logprobs, own)
            hearing.looked()

    def _check_routes(self, wire: Wire, samples: Sequence[Sample], *, num_prompt: int) -> None:
        for sample in samples:
            num_wanted = num_prompt + len(sample.tokens) - 1
            if sample.routes is None or len(sample.routes) != num_wanted:
                told = "none" if sample.routes is None else f"those of {len(sample.routes)} tokens"
                raise EngineError(
                    f"{wire.name} was asked for the experts of {num_wanted} tokens and gave {told}{self._routes_hint}; set"
                    ' model.route_replay to "off" to train without')

    def _seed(self, seed: int, first: int) -> int:
        """Return the seed under which the engine's samples 0, 1, ... equal those from `first` on of the whole request."""
        return seed_from(seed, first)

    def _reporting(self, sampling: Sampling) -> dict[str, Any]:
        """Return the request fields for the form and the distribution of the reported log-probabilities."""
        scaled = {"scaled_logprobs": True} if sampling.scaled_logprobs and sampling.is_restricted else {}
        routes = {"return_routed_experts": True} if sampling.routes else {}
        supports = {"return_supports": True} if sampling.asks_supports else {}
        return {"encoding_format": "base64", **scaled, **routes, **supports}  # an engine that does not know it answers with lists

    async def score(self, wire: Wire, request: ScoreRequest, *, adapter: str) -> PromptScore:
        body: dict[str, Any] = {"tokens": request.tokens, "top_k": request.top_k}
        if request.targets is not None:
            body["targets"] = request.targets
        if (draws := request.draws) is not None:
            body |= {"draws": draws.num, "temperature": draws.temperature, "seed": draws.seed}
        if adapter:
            body["adapter"] = adapter
        answer = await wire.call("POST", "/v1/score", body)

        def read() -> PromptScore:
            version = split_adapter_name(adapter)[1] if adapter else answer["version"]
            top = _rows(answer["top_logprobs"]) if request.top_k else ()
            drawn = _rows(answer["draws"]) if draws is not None else ()
            target_logprobs = () if request.targets is None else (
                (math.nan,) * len(request.targets[0]), *map(tuple, answer["target_logprobs"]))
            return PromptScore((math.nan, *answer["logprobs"]), version, top, target_logprobs, drawn).check(request)

        return await asyncio.to_thread(read) if request.top_k or request.targets is not None or draws is not None else read()

    async def stage(self, wire: Wire, manifest: Manifest) -> None:
        body = {
            "version": manifest.version, "folder": manifest.folder, "broadcast": manifest.broadcast, "fingerprint": manifest.fingerprint}
        await wire.call("POST", "/v1/weights/stage", {**body, **self._staging})

    async def switch(self, wire: Wire, manifest: Manifest, interrupt: Interrupt) -> None:
        await wire.call("POST", "/v1/weights/switch", {"version": manifest.version, "interrupt": interrupt})

    async def prove(self, wire: Wire, canary: tuple[int, ...], *, adapter: str) -> Proof:
        told = await wire.call("POST", "/v1/weights/prove", {"tokens": canary} | ({"adapter": adapter} if adapter else {}))
        version = split_adapter_name(adapter)[1] if adapter else told["version"]
        return Proof(version, told["fingerprint"], tuple(told["logprobs"]))

    async def sleep(self, wire: Wire, *, keep_weights: bool) -> None:
        await wire.call("POST", "/v1/weights/sleep", {"keep_weights": keep_weights})

    async def wake(self, wire: Wire) -> None:
        await wire.call("POST", "/v1/weights/wake", {})

    async def load_adapter(self, wire: Wire, name: str, folder: str) -> None:
        await wire.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def unload_adapter(self, wire: Wire, name: str) -> None:
        await wire.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def adapters(self, wire: Wire) -> dict[str, str]:
        return {model["id"]: model.get("root") or "" for model in await self._models(wire) if model.get("parent")}

    async def health(self, wire: Wire) -> dict[str, Any]:
        return await wire.call("GET", "/health")

    async def resume(self, wire: Wire) -> None:
        await wire.call("POST", "/resume", {})

    async def _check_model(self, wire: Wire) -> None:
        served = await self._models(wire)
        names = {PurePath(str(model.get(key))).name for model in served for key in ("id", "root")}
        if PurePath(self._model).name not in names:
            raise EngineError(
                f"{wire.name} serves {', '.join(repr(model['id']) for model in served)} instead of {self._model!r}; start it on that model"
                f"{self._model_hint}, or set model.path")

    async def _models(self, wire: Wire) -> Sequence[Mapping[str, Any]]:
        return (await wire.call("GET", "/v1/models"))["data"]


def _check_supports(wire: Wire, samples: Sequence[Sample]) -> None:
    """Raise EngineError if a sample lacks the tokens among which its own were drawn."""
    for sample in samples:
        told, num_wanted = sample.supports, len(sample.tokens)
        if told is None or len(told) != num_wanted or not told.hold(sample.tokens).all():
            wrong = "none" if told is None else "one without its token" if len(told) == num_wanted else f"{len(told)}"
            raise EngineError(
                f"{wire.name} was asked for the supports of {num_wanted} tokens and gave {wrong}; set model.support_replay to \"off\" to"
                " train without")


def _rows(rows: Sequence[Sequence[tuple[int, float]]]) -> tuple[TopTokens, ...]:
    """Convert the engine's rows, which lack the first position, to one row of (token, log-probability) per position."""
    return ((), *(tuple((token, logprob) for token, logprob in row) for row in rows))
