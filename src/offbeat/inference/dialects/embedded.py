"""Offbeat's own engine: OpenAI's completions with `token_ids`, and a log-probability and a version for every token.

Weights have endpoints of their own; adapters have vLLM's, and a fingerprint.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from offbeat.errors import EngineError
from offbeat.inference.dialects.base import Wire
from offbeat.inference.sampling import Sample, Sampling
from offbeat.weights.adapters import split_adapter_name
from offbeat.weights.protocol import Interrupt, Manifest, Proof


class EmbeddedDialect:
    """See `Dialect`."""

    _model_hint = ""

    def __init__(self, *, model: str = "", lora_rank: int = 0) -> None:
        """`model` is the folder that must be served, any where it is empty; `lora_rank` is the rank of the adapters to come, 0 for none."""
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
            "top_p": sampling.top_p, "top_k": sampling.top_k, "logprobs": 0, "return_token_ids": True,
        }
        if sampling.stop:
            body["stop"] = sampling.stop
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if adapter:
            body["model"] = adapter
        answer = await wire.call("POST", "/v1/completions", body)
        return [self._sample(choice, adapter) for choice in answer["choices"]]

    def _sample(self, choice: Mapping[str, Any], adapter: str) -> Sample:
        tokens = tuple(choice["token_ids"])
        versions = (split_adapter_name(adapter)[1],) * len(tokens) if adapter else tuple(choice["versions"])
        return Sample(tokens, tuple(choice["logprobs"]["token_logprobs"]), versions, choice["text"], choice["finish_reason"]).check()

    async def stage(self, wire: Wire, manifest: Manifest) -> None:
        body = {"version": manifest.version, "folder": manifest.folder, "broadcast": manifest.broadcast}
        await wire.call("POST", "/v1/weights/stage", body)

    async def switch(self, wire: Wire, manifest: Manifest, interrupt: Interrupt) -> None:
        await wire.call("POST", "/v1/weights/switch", {"version": manifest.version, "interrupt": interrupt})

    async def prove(self, wire: Wire, canary: tuple[int, ...], *, adapter: str) -> Proof:
        query = f"?adapter={adapter}" if adapter else ""
        fingerprint = await wire.call("GET", f"/v1/weights/fingerprint{query}")
        score = await wire.call("POST", "/v1/score", {"tokens": canary} | ({"adapter": adapter} if adapter else {}))
        if fingerprint["version"] != score["version"]:
            raise EngineError(f"{wire.name} changed from version {fingerprint['version']} to {score['version']} during its proof")
        version = split_adapter_name(adapter)[1] if adapter else fingerprint["version"]
        return Proof(version, fingerprint["fingerprint"], sum(score["logprobs"]) / len(score["logprobs"]))

    async def load_adapter(self, wire: Wire, name: str, folder: str) -> None:
        await wire.call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def unload_adapter(self, wire: Wire, name: str) -> None:
        await wire.call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def health(self, wire: Wire) -> dict[str, Any]:
        return await wire.call("GET", "/health")

    async def _check_model(self, wire: Wire) -> None:
        served = await self._models(wire)
        names = {PurePath(str(model.get(key))).name for model in served for key in ("id", "root")}
        if PurePath(self._model).name not in names:
            raise EngineError(
                f"{wire.name} serves {', '.join(repr(model['id']) for model in served)} instead of {self._model!r}; start it on that model"
                f"{self._model_hint}, or set model.path")

    async def _models(self, wire: Wire) -> Sequence[Mapping[str, Any]]:
        return (await wire.call("GET", "/v1/models"))["data"]
