"""SGLang (0.5.23 or later) by its documented native HTTP interface: `/generate`, and separate endpoints for weights and adapters.

Its quirks: it holds one set of weights, so a version is loaded at the switch; an update waits for requests in flight unless generation is
paused; and cached prefixes cannot be dropped while requests keep their cache, so each version has its own namespace of prefixes.
Log-probabilities are at the sampling temperature, before top_p and top_k.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from offbeat.aio import deadline, gather_all
from offbeat.chat.shaping import Shaping, StructureKind
from offbeat.errors import EngineError, RefusedError
from offbeat.inference.dialects.base import Wire
from offbeat.inference.hearing import Hearing
from offbeat.inference.sampling import PromptScore, Sample, Sampling, ScoreRequest, TopTokens
from offbeat.types import Version
from offbeat.weights.adapters import split_adapter_name
from offbeat.weights.protocol import Interrupt, Manifest, Proof

_PAUSES: dict[Interrupt, str] = {"recompute": "retract", "keep": "in_place"}
_CONTINUE_TIMEOUT_S = 10.0
_STRUCTURES: Mapping[StructureKind, str] = {"json_schema": "json_schema", "regex": "regex", "grammar": "ebnf"}
_UNPUBLISHED: Version = -1
_ANY_TOKENS = (0, 0)


class _Span(msgspec.Struct):
    start: int
    end: int
    version: str


class _FinishReason(msgspec.Struct):
    type: str


class _MetaInfo(msgspec.Struct):
    output_token_logprobs: list[tuple[float | None, int, msgspec.Raw]]
    finish_reason: _FinishReason
    weight_versions: list[_Span] = []
    output_top_logprobs: list[list[tuple[float, int, msgspec.Raw]]] = []


class _SglangAnswer(msgspec.Struct):
    text: str
    meta_info: _MetaInfo


_NEUTRAL: Mapping[str, Any] = {
    "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Settings of the next token's distribution, without effect: a server may have been started with other defaults."""

_ANSWER = msgspec.json.Decoder(_SglangAnswer)


class SGLangDialect:
    """Implements `Dialect` for SGLang. Fingerprints are unknown: the canary alone proves a version."""

    def __init__(self) -> None:
        self._namespaces: dict[str, str] = {}

    async def check(self, wire: Wire) -> None:
        await wire.call("GET", "/health")
        meta = await self._score_tokens(wire, _ANY_TOKENS, adapter="")
        if missing := {"weight_version", "weight_versions", "input_token_logprobs"} - meta.keys():
            raise EngineError(
                f"{wire.name} answers /generate without {', '.join(sorted(missing))}, by which versions are told apart; it takes"
                " SGLang 0.5.23 or later")

    async def generate(self, wire: Wire, prompt: tuple[int, ...], sampling: Sampling, *, n: int, adapter: str) -> list[Sample]:
        if sampling.scaled_logprobs and not sampling.shaping.is_plain:
            raise RefusedError(
                f"SGLang returns log-probabilities of logits as {', '.join(sampling.shaping.acting)} left them, and scaled_logprobs wants"
                " those of the model; leave one of them out, or use the embedded engine")
        params: dict[str, Any] = {**_NEUTRAL, **_shaping(sampling.shaping)} | {
            "max_new_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1, "stop": list(sampling.stop)}
        if sampling.stop_token_ids:
            params["stop_token_ids"] = sampling.stop_token_ids
        if sampling.ignore_eos:
            params["ignore_eos"] = True
        fields = {"top_logprobs_num": sampling.top_logprobs} if sampling.top_logprobs else {}
        seeds = [None] * n if sampling.seed is None else [sampling.seed + sampling.first_sample + i for i in range(n)]
        # One request per sample: they share the prompt's prefix in the cache.
        read = partial(_sample, wire, adapter=adapter, num_top=sampling.top_logprobs)
        return await gather_all(
            wire.fetch("/generate", self._body(
                wire, prompt, params if seed is None else params | {"sampling_seed": seed}, adapter=adapter, **fields), read)
            for seed in seeds)

    async def hear_running(self, wire: Wire, hearings: Mapping[str, Hearing]) -> None:
        del hearings
        raise RefusedError(f"{wire.name} does not tell what it has generated so far; use the embedded engine")

    async def score(self, wire: Wire, request: ScoreRequest, *, adapter: str) -> PromptScore:
        if request.targets is not None:
            raise RefusedError("SGLang cannot score other targets at each position; leave targets out, or use the embedded engine")
        if request.draws is not None:
            raise RefusedError("SGLang cannot draw alternatives to the tokens of a prompt; leave them out, or use the embedded engine")
        fields = {"top_logprobs_num": request.top_k} if request.top_k else {}
        meta = await self._score_tokens(wire, request.tokens, adapter=adapter, **fields)
        logprobs = (math.nan, *(logprob for logprob, *_ in meta["input_token_logprobs"][1:]))
        version = split_adapter_name(adapter)[1] if adapter else _version(meta["weight_version"])
        top = ((), *map(_top_tokens, meta["input_top_logprobs"][1:])) if request.top_k else ()
        return PromptScore(logprobs, version, top).check(request)

    async def stage(self, wire: Wire, manifest: Manifest) -> None:
        if manifest.broadcast:
            raise EngineError(f"{wire.name} reads versions from folders; set weights.channel to disk")

    async def switch(self, wire: Wire, manifest: Manifest, interrupt: Interrupt) -> None:
        body = {
            "model_path": manifest.folder, "weight_version": str(manifest.version), "abort_all_requests": False,
            "flush_cache": interrupt != "keep"}
        if interrupt == "drain":  # without a pause, an update waits for all requests in flight and holds back new ones
            await wire.call("POST", "/update_weights_from_disk", body)
        else:
            await wire.call("POST", "/pause_generation", {"mode": _PAUSES[interrupt]})
            try:
                await wire.call("POST", "/update_weights_from_disk", body)
            finally:  # also after the deadline has passed, hence under a deadline of its own
                async with deadline(f"continue_generation on {wire.name}", _CONTINUE_TIMEOUT_S):
                    await wire.call("POST", "/continue_generation", {})
        self._namespaces[wire.name] = f"v{manifest.version}"

    async def prove(self, wire: Wire, canary: tuple[int, ...], *, adapter: str) -> Proof:
        meta = await self._score_tokens(wire, canary, adapter=adapter)
        logprobs = [logprob for logprob, *_ in meta["input_token_logprobs"][1:]]  # the first token has none
        if len(logprobs) != len(canary) - 1 or None in logprobs:
            raise EngineError(f"{wire.name} scored {len(logprobs)} tokens of a canary of {len(canary)}")
        version = split_adapter_name(adapter)[1] if adapter else _version(meta["weight_version"])
        return Proof(version, None, tuple(logprobs))

    async def sleep(self, wire: Wire, *, keep_weights: bool) -> None:  # noqa: ARG002
        raise RefusedError(f"{wire.name} is an SGLang server, which is never put to sleep; use the embedded engine or vLLM")

    async def wake(self, wire: Wire) -> None:
        """Nothing: it never sleeps."""

    async def load_adapter(self, wire: Wire, name: str, folder: str) -> None:
        try:
            await wire.call("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        except RefusedError:
            if (await self.adapters(wire)).get(name) != folder:
                raise

    async def unload_adapter(self, wire: Wire, name: str) -> None:
        try:
            await wire.call("POST", "/unload_lora_adapter", {"lora_name": name})
        except RefusedError:
            if name in await self.adapters(wire):
                raise

    async def health(self, wire: Wire) -> dict[str, Any]:
        await wire.call("GET", "/health")
        info = await wire.call("GET", "/model_info")
        return info | {"version": _version(info["weight_version"])}

    async def resume(self, wire: Wire) -> None:
        await wire.call("POST", "/continue_generation", {})

    async def adapters(self, wire: Wire) -> dict[str, str]:
        models = await wire.call("GET", "/v1/models")
        return {model["id"]: model.get("root", "") for model in models["data"]}

    async def _score_tokens(self, wire: Wire, tokens: tuple[int, ...], *, adapter: str, **fields: Any) -> dict[str, Any]:
        params = {**_NEUTRAL, "max_new_tokens": 1, "temperature": 1.0}
        body = self._body(wire, tokens, params, adapter=adapter, logprob_start_len=0, **fields)
        return (await wire.call("POST", "/generate", body))["meta_info"]

    def _body(self, wire: Wire, prompt: tuple[int, ...], params: Mapping[str, Any], *, adapter: str, **fields: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, **fields}
        if adapter:
            body["lora_path"] = adapter
        if wire.name in self._namespaces:
            body["extra_key"] = self._namespaces[wire.name]
        return body


def _shaping(shaping: Shaping) -> dict[str, Any]:
    """Return the parameters of /generate for this shaping. Raises RefusedError if SGLang has none for a part of it."""
    told = shaping.fields()
    told.pop("structured_outputs", None)
    if "min_tokens" in told:
        told["min_new_tokens"] = told.pop("min_tokens")
    if (structure := shaping.structure) is not None:
        if structure.kind == "choice":
            told["regex"] = "|".join(map(re.escape, structure.content if isinstance(structure.content, list) else ()))
        elif structure.kind == "json_object":
            told["json_schema"] = '{"type": "object"}'
        else:
            told[_STRUCTURES[structure.kind]] = structure.definition
    for name in ("bad_words", "allowed_token_ids"):
        if name in told:
            raise RefusedError(f"SGLang has no {name}; leave it out, or use the embedded engine or vLLM")
    return told


def _top_tokens(row: Sequence[Sequence[Any]]) -> TopTokens:
    return tuple((token, logprob) for logprob, token, *_ in row)


def _sample(wire: Wire, data: bytes, *, adapter: str, num_top: int) -> Sample:
    answer = _ANSWER.decode(data)
    meta = answer.meta_info
    logprobs = np.array([logprob for logprob, *_ in meta.output_token_logprobs], np.float32)
    tokens = np.array([token for _, token, *_ in meta.output_token_logprobs], np.int32)
    if adapter:
        versions = np.full(len(tokens), split_adapter_name(adapter)[1], np.int32)
    else:
        spans = meta.weight_versions
        if [span.start for span in spans] != [0, *(span.end for span in spans[:-1])]:
            raise EngineError(f"{wire.name} returned versions of its tokens with gaps: {msgspec.to_builtins(spans)}")
        versions = np.repeat(np.array([_version(span.version) for span in spans], np.int32), [span.end - span.start for span in spans])
    top = tuple(map(_top_tokens, meta.output_top_logprobs)) if num_top else ()
    return Sample(tokens, logprobs, versions, answer.text, meta.finish_reason.type, top_logprobs=top).check()


def _version(label: str) -> Version:
    """Parse a weight version's label; weights without a numeric label were not published by this run."""
    return int(label) if label.isascii() and label.isdecimal() else _UNPUBLISHED
