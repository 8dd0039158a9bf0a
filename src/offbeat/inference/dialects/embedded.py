"""Offbeat's own engine: OpenAI's completions with `token_ids`, and a log-probability and a version for every token.

Weights have endpoints of their own; adapters have vLLM's, and a fingerprint.
"""

from collections.abc import Mapping
from typing import Any

from offbeat.errors import EngineError
from offbeat.inference.dialects.base import Wire
from offbeat.inference.sampling import Sample, Sampling
from offbeat.weights.adapters import split_adapter_name
from offbeat.weights.protocol import Interrupt, Manifest, Proof


class EmbeddedDialect:
    """See `Dialect`."""

    async def check(self, wire: Wire) -> None:
        await self.health(wire)

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
