"""What is said to an engine, and how its answers are read: one dialect per kind of engine, no I/O.

The embedded engine speaks OpenAI's completions with three extensions: `token_ids`, a log-probability and a version for every token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.errors import EngineError
from offbeat.types import Version
from offbeat.weights.protocol import Interrupt, Manifest


@dataclass(frozen=True)
class Sampling:
    """How to sample; the fields are OpenAI's."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Sample:
    """One generated continuation of L tokens, the ending token included.

    Attributes:
        token_ids: [L].
        logprobs: [L], of each token under the distribution that it was sampled from.
        versions: [L], weight version that sampled each token.
        text: what the tokens say, without special tokens.
        finish_reason: "stop" or "length".
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[Version, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class Request:
    """One HTTP request: a method, a path and a JSON body."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None


class EmbeddedDialect:
    """Offbeat's own engine."""

    def generate(self, prompt: tuple[int, ...], sampling: Sampling, *, n: int) -> Request:
        body: dict[str, Any] = {
            "prompt": prompt, "n": n, "max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "top_k": sampling.top_k, "logprobs": 0, "return_token_ids": True,
        }
        if sampling.stop:
            body["stop"] = sampling.stop
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        return Request("POST", "/v1/completions", body)

    def samples(self, answer: Mapping[str, Any]) -> list[Sample]:
        """Read an answer to `generate`.

        Raises:
            EngineError: a sample has not one log-probability and version per token, or did not finish by itself.
        """
        return [self._sample(choice) for choice in answer["choices"]]

    def _sample(self, choice: Mapping[str, Any]) -> Sample:
        sample = Sample(
            tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]), tuple(choice["versions"]), choice["text"],
            choice["finish_reason"])
        if not len(sample.token_ids) == len(sample.logprobs) == len(sample.versions):
            raise EngineError(
                f"an engine gave {len(sample.token_ids)} tokens with {len(sample.logprobs)} log-probabilities and"
                f" {len(sample.versions)} versions")
        if sample.finish_reason not in ("stop", "length"):
            raise EngineError(f"an engine ended a sample with {sample.finish_reason!r}")
        return sample

    def stage(self, manifest: Manifest) -> Request:
        return Request("POST", "/v1/weights/stage", {"version": manifest.version, "folder": manifest.folder})

    def switch(self, version: Version, interrupt: Interrupt) -> Request:
        return Request("POST", "/v1/weights/switch", {"version": version, "interrupt": interrupt})

    def fingerprint(self) -> Request:
        return Request("GET", "/v1/weights/fingerprint")

    def score(self, tokens: tuple[int, ...]) -> Request:
        return Request("POST", "/v1/score", {"tokens": tokens})

    def health(self) -> Request:
        return Request("GET", "/health")
