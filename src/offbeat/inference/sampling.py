"""How to sample and score, and what samples and scores are: shared by workflows, services, the pool and every dialect."""

import math
from dataclasses import dataclass

from offbeat.errors import EngineError
from offbeat.types import Version

TopTokens = tuple[tuple[int, float], ...]
"""The likeliest tokens at one position, each with its log-probability, the likeliest first."""


@dataclass(frozen=True)
class Sampling:
    """How to sample; the fields are OpenAI's and vLLM's, and two more.

    Attributes:
        stop: strings that end a sample; the tokens that complete one are part of it.
        stop_token_ids: tokens that end a sample, besides the tokenizer's end token, and are part of it.
        ignore_eos: go on past the tokenizer's end token.
        scaled_logprobs: log-probabilities of all tokens at this temperature, as if there were no top_k and top_p; without either it is no
            difference.
        top_logprobs: the number of likeliest tokens that are wanted at each sampled position.
        first_sample: with a seed, the number of the first of the samples that are wanted, where a request was cut into several.
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

    @property
    def is_restricted(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True)
class Sample:
    """One generated continuation of L tokens, the ending token included.

    Attributes:
        token_ids: [L].
        logprobs: [L], of each token under the distribution that it was sampled from, at temperature 0 under that of temperature 1.
        versions: [L], version of the weights, or of the adapter, that sampled each token.
        text: what the tokens say, without special tokens and without what stopped it.
        finish_reason: "stop" or "length".
        num_retries: engines that failed this request before one finished it.
        top_logprobs: [L], under the same distribution as `logprobs`, fewer than asked for where it holds fewer tokens; () if not asked for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[Version, ...]
    text: str
    finish_reason: str
    num_retries: int = 0
    top_logprobs: tuple[TopTokens, ...] = ()

    def check(self) -> "Sample":
        """Itself, if it is whole.

        Raises:
            EngineError: it has not one log-probability and version per token, or did not finish by itself.
        """
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise EngineError(
                f"an engine gave {len(self.token_ids)} tokens with {len(self.logprobs)} log-probabilities and"
                f" {len(self.versions)} versions")
        if self.top_logprobs and len(self.top_logprobs) != len(self.token_ids):
            raise EngineError(f"an engine gave {len(self.token_ids)} tokens with the likeliest at {len(self.top_logprobs)} positions")
        if self.finish_reason not in ("stop", "length"):
            raise EngineError(f"an engine ended a sample with {self.finish_reason!r}")
        return self


@dataclass(frozen=True)
class Draws:
    """Tokens to be drawn, with replacement, in the place of each given token but the first; the same seed draws the same."""

    num: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class ScoreRequest:
    """What is to be known of L given tokens, at temperature 1.

    Attributes:
        tokens: [L], at least 2.
        top_k: the number of likeliest tokens that are wanted at each position.
        targets: [L], any number of tokens at each position, whose log-probabilities are wanted there, after the tokens before it.
        draws: tokens that are to be drawn at each position, at a temperature of their own, and told with their log-probabilities.
    """

    tokens: tuple[int, ...]
    top_k: int = 0
    targets: tuple[tuple[int, ...], ...] | None = None
    draws: Draws | None = None


@dataclass(frozen=True)
class PromptScore:
    """What a model says of L given tokens; nothing stands before the first, so it has NaN.

    Attributes:
        logprobs: [L], of each token after those before it.
        version: of the weights, or of the adapter, that scored.
        top: [L], the likeliest tokens at each position; none at the first. () if not asked for.
        target_logprobs: as the request's targets. () if not asked for.
        draws: [L], the tokens drawn at each position; none at the first. () if not asked for.
    """

    logprobs: tuple[float, ...]
    version: Version
    top: tuple[TopTokens, ...] = ()
    target_logprobs: tuple[tuple[float, ...], ...] = ()
    draws: tuple[TopTokens, ...] = ()

    def check(self, request: ScoreRequest) -> "PromptScore":
        """Itself, if it answers the request.

        Raises:
            EngineError: it has not one entry for each token, or a log-probability that is none.
        """
        length = len(request.tokens)
        sizes = (len(self.logprobs), len(self.top) or length, len(self.target_logprobs) or length, len(self.draws) or length)
        if sizes != (length,) * 4 or any(map(math.isnan, self.logprobs[1:])):
            raise EngineError(f"an engine scored {len(self.logprobs)} of {length} tokens")
        return self
