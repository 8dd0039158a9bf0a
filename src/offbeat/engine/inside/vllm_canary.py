"""The canary of a proof in a vLLM server: tokens whose log-probabilities are requested ahead of waiting requests. Used by `vllm_inside`."""

import dataclasses
import os
import uuid
from typing import Any

from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm_files import RefusedError

_FIRST_VERSION = int(os.environ.get("OFFBEAT_VERSION", "-1"))
_FIRST_IMAGE = 1 << 30
"""The least id of an image (`offbeat.data.image_store`)."""
_AHEAD = -1
"""Priority of a proof, which has a deadline and may meet many waiting requests; lower is earlier, and all others have 0."""


@dataclasses.dataclass(frozen=True)
class Canary:
    """Tokens whose log-probabilities were requested, ahead of waiting requests."""

    tokens: list[int]
    collectors: list[Any]

    @classmethod
    async def ask(cls, engine: AsyncLLM, tokens: list[int]) -> "Canary":
        """Queue the requests that score the canary; works also while the server is paused."""
        if len(tokens) < 2 or not all(type(token) is int and token >= 0 for token in tokens):
            raise RefusedError(f"a canary is two tokens or more, got {str(tokens)[:200]}")
        settings = {"max_tokens": 1, "temperature": 1.0, "detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
        if engine.vllm_config.lora_config is not None and current_platform.is_cpu():  # prompt_logprobs crash vLLM there
            asked = [
                (tokens[:end], SamplingParams(logprobs=1, logprob_token_ids=[tokens[end]], **settings)) for end in range(1, len(tokens))]
        else:
            asked = [(tokens, SamplingParams(prompt_logprobs=0, **settings))]
        return cls(tokens, [
            await engine.add_request(f"canary-{uuid.uuid4().hex}", {"prompt_token_ids": prompt}, params, priority=priority_of(engine))
            for prompt, params in asked])

    async def collect(self) -> tuple[list[float], int]:
        """Return the log-probability of each token but the first, and the version that scored them."""
        outputs = [await collector.get() for collector in self.collectors]
        versions = {read_version(span.version) for output in outputs for span in output.outputs[0].weight_versions or ()}
        if len(versions) != 1:
            raise RuntimeError(f"the canary was scored by versions {sorted(versions)}")
        whole = outputs[0].prompt_logprobs
        rows = whole[1:] if whole else [output.outputs[0].logprobs[0] for output in outputs]
        # An image's placeholders have the model's image token in their places there; the proof does not compare them.
        own = [next(iter(row)) if token >= _FIRST_IMAGE else token for row, token in zip(rows, self.tokens[1:], strict=True)]
        return [row[token].logprob for row, token in zip(rows, own, strict=True)], versions.pop()


def priority_of(engine: AsyncLLM) -> int:
    """Return the priority of a proof; 0 if the scheduler honours none."""
    return _AHEAD if engine.vllm_config.scheduler_config.policy == "priority" else 0


def read_version(version: str) -> int:
    """Parse a version; vLLM calls the weights that it started with "default"."""
    return _FIRST_VERSION if version == "default" else int(version)
