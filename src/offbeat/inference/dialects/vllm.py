"""vLLM 0.32 or later: its OpenAI front end, its LoRA interface, and for whole weights the endpoints of `inside/vllm_inside.py`.

All of vLLM's quirks are handled here and in that file. Torch-free.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.data.image_store import FIRST_ID
from offbeat.errors import EngineError, RefusedError
from offbeat.inference.dialects.base import Wire
from offbeat.inference.dialects.completions import top_tokens
from offbeat.inference.dialects.embedded import EmbeddedDialect
from offbeat.inference.sampling import PromptScore, Sample, Sampling, ScoreRequest
from offbeat.types import Version
from offbeat.weights.adapters import split_adapter_name
from offbeat.weights.protocol import Interrupt, Manifest, Proof

_GUIDE = "`offbeat docs engines` says how to start it"
_NARROW_TOP_P = 1e-6
_NEUTRAL: Mapping[str, Any] = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Settings of the next token's distribution, without effect: a field that a request does not name is the model's own in its
generation_config.json, unless the server was started with --generation-config vllm."""
_INITIAL: Version = -1
"""Version that a server without our endpoints always serves: the weights that it was started with."""


class VllmDialect(EmbeddedDialect):
    """Implements `Dialect` for vLLM. `stage` and `switch` are inherited, since `vllm_inside` offers the embedded engine's endpoints."""

    _model_hint = " or under that --served-model-name"
    _unversioned = _INITIAL
    _named = _NEUTRAL

    def __init__(self, *, model: str, whole_weights: bool, lora: bool, on_cpu: bool = False, changes: bool = False) -> None:
        """
        Args:
            model: the folder or hub id that must be served; any where it is empty.
            whole_weights, lora: whether whole weights, or adapters, will be published.
            on_cpu: whether servers compute on CPUs, as far as is known. With adapters, they do not survive a request for a prompt's
                log-probabilities there, and mix adapters into other requests if they run without `vllm_inside`.
            changes: whether versions of whole weights may be published as changes of earlier ones, which servers keep for it.
        """
        super().__init__(model=model)
        self._whole_weights = whole_weights
        self._lora = lora
        self._lora_on_cpu = lora and on_cpu
        self._staging = {"keep": True} if changes else {}

    async def check(self, wire: Wire) -> None:
        await wire.call("GET", "/health")
        if self._model:
            await self._check_model(wire)
        if self._whole_weights and await self._serving(wire) is None:
            raise EngineError(
                f"{wire.name} cannot take new weights: it runs without --middleware vllm_inside.Inside and --worker-extension-cls "
                f"vllm_inside.WorkerExtension; {_GUIDE}")
        if self._lora and not await self._loads_adapters(wire):
            raise EngineError(
                f"{wire.name} cannot load adapters: it runs without --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1; {_GUIDE}")
        if self._lora_on_cpu and await self._serving(wire) is None:
            raise EngineError(
                f"{wire.name} would mix adapters into requests without one, as vLLM on CPUs does if it runs without --middleware "
                f"vllm_inside.Inside and --worker-extension-cls vllm_inside.WorkerExtension; {_GUIDE}; if it has accelerators, give "
                "inference.devices_per_engine")
        await self._check_logprobs(wire)

    async def generate(self, wire: Wire, prompt: tuple[int, ...], sampling: Sampling, *, n: int, adapter: str) -> list[Sample]:
        if sampling.scaled_logprobs and sampling.is_restricted:
            raise RefusedError(
                "vLLM returns log-probabilities only of the distribution that it draws from, after top_k, top_p, penalties and structures;"
                " leave them out, or use the embedded engine")
        if sampling.temperature == 0 and n > 1:  # vLLM refuses n > 1 at temperature 0, where all samples would be equal
            return await self.generate(wire, prompt, sampling, n=1, adapter=adapter) * n
        return await super().generate(wire, prompt, sampling, n=n, adapter=adapter)

    _routes_hint = ", as vLLM does if it runs without --enable-return-routed-experts"

    def _seed(self, seed: int, first: int) -> int:
        return seed + first  # vLLM gives sample i of a request the request's seed plus i

    def _reporting(self, sampling: Sampling) -> dict[str, Any]:
        return {"return_tokens_as_token_ids": True} if sampling.top_logprobs else {}

    async def score(self, wire: Wire, request: ScoreRequest, *, adapter: str) -> PromptScore:
        if self._lora_on_cpu:
            raise RefusedError(
                "vLLM on CPUs with adapters cannot return log-probabilities of prompts, which would end it; use the embedded engine, or"
                " give inference.devices_per_engine if it has accelerators")
        if request.draws is not None:
            raise RefusedError("vLLM cannot draw alternatives to the tokens of a prompt; leave them out, or use the embedded engine")
        answer = await wire.call("POST", "/v1/completions", {
            **_NEUTRAL, "prompt": request.tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": request.top_k,
            } | ({"model": adapter} if adapter else {}))
        choice = answer["choices"][0]
        rows = [{int(token): entry["logprob"] for token, entry in row.items()} for row in choice["prompt_logprobs"][1:]]
        version = split_adapter_name(adapter)[1] if adapter else choice.get("versions", (_INITIAL,))[0]
        top = ((), *(top_tokens(row, request.top_k) for row in rows)) if request.top_k else ()
        told = (row[token if token < FIRST_ID else next(iter(row))] for token, row in zip(request.tokens[1:], rows, strict=True))
        logprobs = (math.nan, *told)
        return PromptScore(logprobs, version, top, _target_logprobs(request, rows)).check(request)

    async def switch(self, wire: Wire, manifest: Manifest, interrupt: Interrupt) -> None:
        # The canary is queued while nothing else runs, so that the proof that follows need not wait.
        body = {"version": manifest.version, "interrupt": interrupt, "canary": manifest.canary}
        await wire.call("POST", "/v1/weights/switch", body)

    async def prove(self, wire: Wire, canary: tuple[int, ...], *, adapter: str) -> Proof:
        if adapter:
            return await self._prove_adapter(wire, canary, adapter)
        if not self._whole_weights:
            scored = await self._score_each(wire, canary, "")
            return Proof(scored[0][1], None, tuple(logprob for logprob, _ in scored))
        told = await wire.call("POST", "/v1/weights/prove", {"tokens": canary})
        return Proof(told["version"], told["fingerprint"], tuple(told["logprobs"]), live=told["num_unread"] == 0)

    async def _prove_adapter(self, wire: Wire, canary: tuple[int, ...], adapter: str) -> Proof:
        try:
            told = await wire.call("POST", "/v1/weights/adapter", {"name": adapter})
        except RefusedError:  # a server given by URL that runs without vllm_inside
            told = {"fingerprint": None, "priority": 0, "wrong": [], "num_unread": None}
        if wrong := told["wrong"]:
            raise RefusedError(f"it does not compute with what is in its folder: {wrong[0]} and {len(wrong) - 1} other tensors differ")
        scored = await self._score_each(wire, canary, adapter, **({"priority": told["priority"]} if told["priority"] else {}))
        version = split_adapter_name(adapter)[1]
        return Proof(version, told["fingerprint"], tuple(logprob for logprob, _ in scored), live=told["num_unread"] == 0)

    async def _score_each(self, wire: Wire, canary: tuple[int, ...], adapter: str, **fields: Any) -> list[tuple[float, Version]]:
        """Score the canary with one request per token: with LoRA on CPUs, asking for a prompt's log-probabilities crashes the engine."""
        scored = await asyncio.gather(*(
            self._score_token(wire, canary[:end], canary[end], adapter, **fields) for end in range(1, len(canary))))
        if len(versions := sorted({version for _, version in scored})) > 1:
            raise EngineError(f"{wire.name} changed between versions {versions} during its proof")
        return scored

    async def load_adapter(self, wire: Wire, name: str, folder: str) -> None:
        # Never with load_inplace: requests in flight would switch adapters midway, or never.
        try:
            await wire.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        except RefusedError:
            if not any(model["id"] == name and model.get("root") == folder for model in await self._models(wire)):
                raise
        except EngineError as exc:
            if "add_lora" in str(exc):  # the folder is at fault: its rank is too large, or its files do not fit this model
                raise RefusedError(str(exc)) from exc
            raise

    async def unload_adapter(self, wire: Wire, name: str) -> None:
        try:
            await wire.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except RefusedError:
            if any(model["id"] == name for model in await self._models(wire)):
                raise

    async def health(self, wire: Wire) -> dict[str, Any]:
        await wire.call("GET", "/health")
        return await self._serving(wire) or {}

    async def resume(self, wire: Wire) -> None:
        await wire.call("POST", "/v1/weights/resume", {})

    async def _check_logprobs(self, wire: Wire) -> None:
        """Check that log-probabilities belong to the sampled distribution: where it holds a single token, they must be 0."""
        answer = await wire.call("POST", "/v1/completions", {
            **_NEUTRAL, "prompt": [0], "max_tokens": 1, "temperature": 1.0, "top_p": _NARROW_TOP_P, "logprobs": 0})
        if abs(answer["choices"][0]["logprobs"]["token_logprobs"][0]) > 1e-3:
            raise EngineError(f"{wire.name} runs without --logprobs-mode processed_logprobs; {_GUIDE}")

    async def _loads_adapters(self, wire: Wire) -> bool:
        try:
            await wire.call("POST", "/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""})
        except RefusedError as exc:
            return "must be provided" in str(exc)
        return True

    async def _serving(self, wire: Wire) -> dict[str, Any] | None:
        """Return the version of the whole weights and whether the server is paused; None if the server cannot tell."""
        try:
            told = await wire.call("GET", "/v1/weights/fingerprint")
        except RefusedError:
            return None
        return {"version": told["version"], "paused": told.get("paused", False)}

    async def _score_token(self, wire: Wire, context: tuple[int, ...], token: int, adapter: str, **fields: Any) -> tuple[float, Version]:
        """Return the log-probability of a token after a context, and the version that scored it."""
        answer = await wire.call("POST", "/v1/completions", {
            **_NEUTRAL, "prompt": context, "max_tokens": 1, "temperature": 1.0, "logprobs": 1, "logprob_token_ids": [token],
            "return_tokens_as_token_ids": True, **fields} | ({"model": adapter} if adapter else {}))
        choice = answer["choices"][0]
        try:
            return choice["logprobs"]["top_logprobs"][0][f"token_id:{token}"], choice.get("versions", (_INITIAL,))[0]
        except KeyError as exc:
            raise EngineError(f"{wire.name} gave no log-probability for the token that was asked for; use vLLM 0.32 or later") from exc


def _target_logprobs(request: ScoreRequest, rows: Sequence[Mapping[int, float]]) -> tuple[tuple[float, ...], ...]:
    """Look up a request's targets in the rows of all positions but the first. Raises RefusedError if one is not among its row's tokens."""
    if request.targets is None:
        return ()
    missing = next(((i, t) for i, row in enumerate(rows, 1) for t in request.targets[i] if t not in row), None)
    if missing is not None:
        position, token = missing
        raise RefusedError(
            f"vLLM returns log-probabilities of a prompt's own tokens and of its top_k = {request.top_k} likeliest, and token {token} is "
            f"neither at position {position}; use the embedded engine")
    return ((math.nan,) * len(request.targets[0]), *(tuple(row[t] for t in ts) for row, ts in zip(rows, request.targets[1:], strict=True)))
