"""Reads answers of /v1/completions: the embedded engine's, as base64 arrays or as lists, and vLLM's. No I/O.

Only the fields that are read are decoded, and a choice at a time: decoding holds the interpreter's lock, so that a long answer would hold
up the event loop, even if another thread decoded it as a whole.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from offbeat.data.expert_routes import unpack_routes
from offbeat.data.sample_supports import unpack_supports
from offbeat.inference.sampling import Sample, TopTokens
from offbeat.types import Version
from offbeat.weights.adapters import split_adapter_name

IMPOSSIBLE = -9999.0
"""Log-probability that vLLM sends for an impossible token, since JSON has no infinity."""

_NONE = msgspec.Raw(b"[]")


class _Logprobs(msgspec.Struct):
    token_logprobs: bytes | list[float | None]
    top_logprobs: msgspec.Raw = _NONE


class _Choice(msgspec.Struct):
    """One sample. Arrays are base64 of little-endian int32 and float32 where the engine offers that, or lists."""

    token_ids: bytes | list[int]
    logprobs: _Logprobs
    text: str
    finish_reason: str | None = None
    versions: bytes | list[int] | None = None
    routed_experts: bytes | None = None
    supports: bytes | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _Completion(msgspec.Struct):
    choices: list[msgspec.Raw]
    usage: _Usage | None = None

    @property
    def num_cached(self) -> int:
        """Number of prompt tokens that were not computed; 0 where the engine does not tell, as vLLM by default."""
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0


class Running(msgspec.Struct):
    """The newest tokens of a running sample, behind its `first` ones, as base64 of little-endian int32 and float32."""

    first: int
    token_ids: bytes
    logprobs: bytes
    versions: bytes

    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.frombuffer(self.token_ids, np.int32), np.frombuffer(self.logprobs, np.float32), np.frombuffer(self.versions, np.int32)


class _AllRunning(msgspec.Struct):
    requests: dict[str, list[Running]]


_RUNNING = msgspec.json.Decoder(_AllRunning)


def read_running(data: bytes) -> dict[str, list[Running]]:
    """Read the answer of /v1/running: the samples of each running request; raises msgspec.DecodeError if it is none."""
    return _RUNNING.decode(data).requests


_COMPLETION, _CHOICE = msgspec.json.Decoder(_Completion), msgspec.json.Decoder(_Choice)
_TOP = msgspec.json.Decoder(list[dict[str, float]])


def read_samples(data: bytes, *, adapter: str, num_top: int, unversioned: Version | None = None) -> list[Sample]:
    """Read the samples of an answer, all of whose tokens have the version of `adapter`, unless that is "", the model itself.

    At each position `num_top` most likely tokens were asked for. `unversioned` is the version of tokens for which the engine reports none;
    None if it must report one.

    Raises:
        msgspec.DecodeError, KeyError, EngineError: the answer is not JSON, lacks something, or a sample is not complete.
    """
    answer = _COMPLETION.decode(data)
    return [_sample(_CHOICE.decode(raw), adapter, num_top, unversioned, num_cached=answer.num_cached) for raw in answer.choices]


def _sample(choice: _Choice, adapter: str, num_top: int, unversioned: Version | None, *, num_cached: int) -> Sample:
    tokens = _vector(choice.token_ids, np.int32)
    told = choice.versions
    if adapter or told is None:
        version = split_adapter_name(adapter)[1] if adapter else unversioned
        if version is None:
            raise KeyError("versions")
        versions = np.full(len(tokens), version, np.int32)
    else:
        versions = _vector(told, np.int32)
    top = tuple(top_tokens(_by_id(row), num_top) for row in _TOP.decode(choice.logprobs.top_logprobs)) if num_top else ()
    return Sample(
        tokens, _vector(choice.logprobs.token_logprobs, np.float32), versions, choice.text, choice.finish_reason or "", top_logprobs=top,
        num_cached_tokens=num_cached, routes=None if choice.routed_experts is None else unpack_routes(choice.routed_experts),
        supports=None if choice.supports is None else unpack_supports(choice.supports)).check()


def top_tokens(logprobs: Mapping[int, float], num: int) -> TopTokens:
    """Return the `num` most likely tokens, without the impossible ones."""
    possible = [(token, logprob) for token, logprob in logprobs.items() if logprob > IMPOSSIBLE]
    return tuple(sorted(possible, key=lambda pair: -pair[1])[:num])


def _by_id(row: Mapping[str, float]) -> dict[int, float]:
    return {int(name.removeprefix("token_id:")): logprob for name, logprob in row.items()}


def _vector(values: bytes | list[Any], dtype: type) -> np.ndarray:
    return np.frombuffer(values, dtype) if isinstance(values, bytes) else np.array(values, dtype)
