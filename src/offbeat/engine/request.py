"""Requests to the engine and their results: sampling parameters, requests, and outputs.

A request is one prompt with n samples that share its prefill, or a `ScoreJob`, which samples nothing. The server, or
`EmbeddedEngine.generate`, creates requests; the engine answers each sample with one `Output`, or with one per decode step of a stream.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from offbeat.data.image_store import FIRST_ID
from offbeat.data.sample_supports import Supports
from offbeat.engine.structure import Grammar
from offbeat.errors import EngineError, RefusedError
from offbeat.inference.sampling import Sampling, TopTokens
from offbeat.types import Version

FinishReason = Literal["stop", "length", "abort"]

MAX_STOPS = 64
"""Largest number of stop strings, and of stop token ids, per request: each id is compared with every token."""

MAX_STOP_CHARS = 4096
"""Largest number of characters in all stop strings of a request: the automaton that finds them has a state for each, built beforehand."""

MAX_TOP = 1024
"""Largest number of most likely tokens reported at one position."""

MAX_PROMPT_TOP = 20
"""Largest number of most likely tokens at each position of a prompt in a completion: prompts may be many, and as long as the context."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Sampling):
    """A `Sampling` within the engine's bounds, or a RefusedError; the engine does not read `first_sample` and `hearing`."""

    max_new_tokens: int = 16

    def __post_init__(self) -> None:
        stop_chars = sum(map(len, self.stop))
        checks = (
            (self.max_new_tokens >= 1, "max_tokens must be >= 1", self.max_new_tokens),
            (self.temperature == 0 or 1e-3 <= self.temperature <= 1e3, "temperature must be 0 (greedy) or 0.001 to 1000", self.temperature),
            (0 < self.top_p <= 1, "top_p must be in (0, 1]", self.top_p),
            (0 <= self.top_k < 2**31, "top_k must be >= 0 and below 2**31; 0 samples from all tokens", self.top_k),
            (all(self.stop), "stop must not hold an empty string", list(self.stop)),
            (len(self.stop) <= MAX_STOPS, f"stop takes at most {MAX_STOPS} strings", len(self.stop)),
            (stop_chars <= MAX_STOP_CHARS, f"stop takes at most {MAX_STOP_CHARS} characters in all", stop_chars),
            (all(0 <= t < 2**31 for t in self.stop_token_ids), "stop_token_ids must be >= 0 and below 2**31", self.stop_token_ids[:9]),
            (len(self.stop_token_ids) <= MAX_STOPS, f"stop_token_ids takes at most {MAX_STOPS} ids", len(self.stop_token_ids)),
            (self.shaping.min_tokens <= self.max_new_tokens, f"min_tokens must be at most max_tokens, {self.max_new_tokens}",
             self.shaping.min_tokens),
            (0 <= self.top_logprobs <= MAX_TOP, f"logprobs must be 0 to {MAX_TOP} likeliest tokens", self.top_logprobs),
        )
        for holds, rule, value in checks:
            if not holds:
                raise RefusedError(f"{rule}, got {value!r}")
        if self.supports and self.scaled_logprobs:
            raise RefusedError(
                "return_supports must be false with scaled_logprobs, which gives log-probabilities over all tokens; leave one of them out")


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One prompt and the n samples requested for it.

    Attributes:
        id: unique among requests in the engine.
        prompt: token ids, at least one.
        adapter: name of the LoRA adapter that generates; empty for the base model.
        stream: answer after every decode step instead of once.
        num_begun: number of tokens at the end of the prompt that are the sample's own, of an earlier request. Its random numbers and its
            stop strings go on after them.
        grammar: the compiled structure of the answer; where it is missing, the engine compiles it between two steps.
    """

    id: str
    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    adapter: str = ""
    stream: bool = False
    num_begun: int = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if self.n < 1:
            raise RefusedError(f"n must be >= 1, got {self.n}")
        if not 0 <= self.num_begun < max(len(self.prompt), 1):
            raise RefusedError(f"begun_tokens must be 0 to {len(self.prompt) - 1}, one less than the prompt's, got {self.num_begun}")
        if self.num_begun and not self.params.shaping.is_plain:
            raise RefusedError(
                "begun_tokens must be 0 with penalties, structures and whatever else depends on the sample so far; leave one of them out")
        if self.stream and self.num_begun:
            raise RefusedError("begun_tokens must be 0 with stream, which gives a sample in parts; leave one of them out")
        if self.stream and self.params.routes:
            raise RefusedError("return_routed_experts must be false with stream, which gives a sample in parts; leave one of them out")
        if self.params.supports and (self.stream or self.num_begun):
            what = "stream, which gives a sample" if self.stream else "begun_tokens, whose sample comes"
            raise RefusedError(f"return_supports must be false with {what} in parts; leave one of them out")

    @property
    def begun(self) -> list[int]:
        """The sample's own tokens at the end of the prompt."""
        return self.prompt[len(self.prompt) - self.num_begun :]

    def check(self, *, vocab_size: int, max_context: int, max_running: int, images: bool = False) -> None:
        """Raise RefusedError with the reason if an engine with these limits can never serve this request; `images` allows placeholders."""
        length, most = len(self.prompt), self.params.max_new_tokens
        if length == 0:
            raise RefusedError("the prompt is empty; it needs at least one token")
        strange = max(self.prompt) >= vocab_size and any(vocab_size <= t and not (images and t >= FIRST_ID) for t in self.prompt)
        if min(self.prompt) < 0 or strange:
            bad = next(t for t in self.prompt if not (0 <= t < vocab_size or (images and t >= FIRST_ID)))
            raise RefusedError(f"prompt token {bad} is outside the vocabulary of {vocab_size} tokens")
        shaping = self.params.shaping
        if shaping.structure is not None and self.params.ignore_eos:
            raise RefusedError("ignore_eos cannot be kept beside the structure of an answer, which ends; leave one of them out")
        for name, ids in (("logit_bias", [token for token, _ in shaping.logit_bias]), ("allowed_token_ids", shaping.allowed_token_ids)):
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                bad = next(t for t in ids if not 0 <= t < vocab_size)
                raise RefusedError(f"{name} has token {bad}, which is outside the vocabulary of {vocab_size} tokens")
        if length + most > max_context:
            raise RefusedError(
                f"the prompt has {length} tokens and max_tokens is {most}, together more than the context of {max_context}; shorten the "
                "prompt or lower max_tokens"
            )
        if self.n > max_running:
            raise RefusedError(f"n must be at most the engine's max_running of {max_running}, got {self.n}")


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreJob:
    """A request to score given tokens at temperature 1; `tokens`, `top_k` and `targets` are as in `inference.sampling.ScoreRequest`.

    Attributes:
        id: unique among requests in the engine.
        draws: number of tokens to draw at each position, at `temperature` and from `seed`, and to report.
        adapter: name of the LoRA adapter that scores; empty for the base model.
        urgent: goes ahead of waiting requests; for proofs, which have deadlines.
    """

    id: str
    tokens: list[int]
    top_k: int = 0
    targets: list[list[int]] | None = None
    draws: int = 0
    temperature: float = 1.0
    seed: int = 0
    adapter: str = ""
    urgent: bool = False


@dataclass(frozen=True, eq=False)
class Scored:
    """Answer to a `ScoreJob` of L tokens; the first token has no score, and None stands for what was not requested.

    Attributes:
        logprobs: [L - 1], log-probability of each token but the first.
        top, target_logprobs, draws: [L - 1], the most likely tokens, the targets' log-probabilities, and the tokens drawn in these places.
        index: number of the job among those that were submitted together.
    """

    version: Version
    logprobs: list[float]
    top: list[TopTokens] | None
    target_logprobs: list[list[float]] | None
    draws: list[TopTokens] | None = None
    index: int = 0


@dataclass(frozen=True, eq=False)
class Output:
    """Tokens of one sample: all of them, or those since the last `Output` of a streaming request.

    Attributes:
        index: number of the sample among the n of its request.
        token_ids: generated tokens, such as [4, 2, 7], including the one that ended the sample.
        logprobs: log-probability of each token under the distribution that it was sampled from (see `sampler`).
        versions: version of the weights that sampled each token.
        finish_reason: None while the sample continues.
        top_logprobs, routes: as of a `Sample`; None if not requested.
        num_cached: number of tokens at the prompt's beginning that were not computed, because an earlier prompt began with them.
        supports: the tokens among which each token was drawn; see `data.sample_supports`. None if not requested, or all are whole.
    """

    index: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[Version]
    finish_reason: FinishReason | None
    top_logprobs: list[TopTokens] | None = None
    num_cached: int = 0
    routes: np.ndarray | None = None
    supports: Supports | None = None


@dataclass(frozen=True, eq=False)
class Event:
    """A message of the engine to one request: tokens, scores, or the error that ended it."""

    request_id: str
    result: Output | Scored | EngineError
