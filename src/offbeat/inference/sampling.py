"""Requests for sampling and scoring, and their results: shared by workflows, services, the pool and every dialect."""

import math
from dataclasses import dataclass, field

import numpy as np

from offbeat.chat.shaping import PLAIN, Shaping
from offbeat.data.sample_supports import Supports
from offbeat.errors import EngineError
from offbeat.inference.hearing import Hearing
from offbeat.types import Version

TopTokens = tuple[tuple[int, float], ...]
"""The most likely tokens at one position, each with its log-probability, in falling order of probability."""


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling. The fields are OpenAI's and vLLM's, plus `scaled_logprobs`, `first_sample` and `hearing`.

    Attributes:
        max_new_tokens: most tokens to generate, the end token included.
        temperature: divides the logits; 0 is greedy. Then `top_p` keeps the likeliest tokens up to this mass, `top_k` this many; 0 is all.
        stop: strings that end a sample; the tokens that complete one are part of the sample, the text is cut before them.
        seed: fixes a sample, whatever else runs in the engine; None draws from the engine's generator.
        stop_token_ids: tokens that end a sample, besides the tokenizer's end token; they are part of the sample.
        ignore_eos: continue past the tokenizer's end token.
        scaled_logprobs: report log-probabilities of the policy as it is trained: over all tokens at this temperature, as if top_k, top_p
            and `shaping` were not set; without them this changes nothing.
        top_logprobs: number of most likely tokens to report at each sampled position.
        routes: report the experts that each token used, where the model is a mixture of experts.
        supports: report the tokens among which each token was drawn, where something leaves tokens out.
        shaping: penalties, biases, and tokens and texts that are left out or required; see `Shaping`.
        first_sample: where a request with a seed was split, the index of the first sample of this part within the whole request.
        hearing: has the tokens of the samples while they are generated, and those that they begin with; see `Hearing`.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    scaled_logprobs: bool = False
    top_logprobs: int = 0
    first_sample: int = 0
    shaping: Shaping = PLAIN
    routes: bool = False
    supports: bool = False
    hearing: Hearing | None = field(default=None, repr=False, compare=False)

    @property
    def is_restricted(self) -> bool:
        """Whether the distribution drawn from differs from the one of all tokens at this temperature."""
        return (self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)) or not self.shaping.is_plain

    @property
    def asks_supports(self) -> bool:
        """Whether the engine is to report supports, of which some may not be whole."""
        return self.supports and self.is_restricted


@dataclass(frozen=True, eq=False)
class Sample:
    """One generated continuation of L tokens, including the token that ended it.

    Attributes:
        tokens: [L] int32, token ids.
        token_logprobs: [L] float32, such as [-0.1, -2.3], log-probability of each token under the distribution that it was sampled from;
            at temperature 0, under the distribution at temperature 1.
        token_versions: [L] int32, version of the weights, or of the adapter, that sampled each token.
        text: the decoded text, without special tokens and without the stop string.
        finish_reason: "stop" or "length".
        num_retries: number of engines that failed this request before one finished it.
        top_logprobs: [L], under the same distribution as the log-probabilities; fewer than requested where the distribution holds fewer
            tokens; () if not requested.
        num_cached_tokens: number of the prompt's tokens that the engine did not compute, because an earlier prompt began with them; 0
            where it does not tell.
        routes: experts of the prompt's and the sample's tokens but the last, [P + L - 1, K]; see `data.expert_routes`. None if not wanted.
        supports: the tokens among which each of the sample's was drawn; see `data.sample_supports`. None if all are whole or not wanted.

    The arrays may be given as any sequences of numbers, and are read-only. `token_ids`, `logprobs` and `versions` are the same as tuples.
    """

    tokens: np.ndarray
    token_logprobs: np.ndarray
    token_versions: np.ndarray
    text: str
    finish_reason: str
    num_retries: int = 0
    top_logprobs: tuple[TopTokens, ...] = ()
    num_cached_tokens: int = 0
    routes: np.ndarray | None = None
    supports: Supports | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("tokens", np.int32), ("token_logprobs", np.float32), ("token_versions", np.int32)):
            array = np.asarray(getattr(self, name), dtype).view()
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """`tokens` as a tuple, such as (4, 2, 7), which can be added to a prompt's."""
        return tuple(self.tokens.tolist())

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(self.token_logprobs.tolist())

    @property
    def versions(self) -> tuple[Version, ...]:
        return tuple(self.token_versions.tolist())

    def check(self) -> "Sample":
        """Return self if the sample ended by itself and has a log-probability and a version for each token, else raise EngineError."""
        if not len(self.tokens) == len(self.token_logprobs) == len(self.token_versions):
            raise EngineError(
                f"an engine gave {len(self.tokens)} tokens with {len(self.token_logprobs)} log-probabilities and"
                f" {len(self.token_versions)} versions")
        if self.top_logprobs and len(self.top_logprobs) != len(self.tokens):
            raise EngineError(f"an engine gave {len(self.tokens)} tokens with the likeliest at {len(self.top_logprobs)} positions")
        if self.finish_reason not in ("stop", "length"):
            raise EngineError(f"an engine ended a sample with {self.finish_reason!r}")
        return self


@dataclass(frozen=True)
class Draws:
    """A request to draw `num` alternatives, with replacement, to each given token but the first; equal seeds draw equal tokens."""

    num: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class ScoreRequest:
    """A request to score L given tokens at temperature 1.

    Attributes:
        tokens: [L] token ids, L >= 2.
        top_k: number of most likely tokens to report at each position.
        targets: [L], token ids to score at each position, after the preceding tokens, such as ((), (5, 6), (7,)).
        draws: number and temperature of the tokens to draw at each position; they are reported with their log-probabilities.
    """

    tokens: tuple[int, ...]
    top_k: int = 0
    targets: tuple[tuple[int, ...], ...] | None = None
    draws: Draws | None = None


@dataclass(frozen=True)
class PromptScore:
    """A model's scores of L given tokens. Nothing precedes the first token, so its log-probability is NaN.

    Attributes:
        logprobs: [L], log-probability of each token given those before it.
        version: version of the weights, or of the adapter, that scored.
        top: [L], the most likely tokens at each position, empty at the first; () if not requested.
        target_logprobs: [L], in the shape of the request's targets; () if not requested.
        draws: [L], the tokens drawn at each position, empty at the first; () if not requested.
    """

    logprobs: tuple[float, ...]
    version: Version
    top: tuple[TopTokens, ...] = ()
    target_logprobs: tuple[tuple[float, ...], ...] = ()
    draws: tuple[TopTokens, ...] = ()

    def check(self, request: ScoreRequest) -> "PromptScore":
        """Return self if it answers the request for every token, without NaN, else raise EngineError."""
        length = len(request.tokens)
        sizes = (len(self.logprobs), len(self.top) or length, len(self.target_logprobs) or length, len(self.draws) or length)
        if sizes != (length,) * 4 or any(map(math.isnan, self.logprobs[1:])):
            raise EngineError(f"an engine scored {len(self.logprobs)} of {length} tokens")
        return self
