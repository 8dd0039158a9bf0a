"""How to sample, and what a sample is: shared by workflows, the pool and every dialect."""

from dataclasses import dataclass

from offbeat.errors import EngineError
from offbeat.types import Version


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
        versions: [L], version of the weights, or of the adapter, that sampled each token.
        text: what the tokens say, without special tokens.
        finish_reason: "stop" or "length".
        num_retries: engines that failed this request before one finished it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[Version, ...]
    text: str
    finish_reason: str
    num_retries: int = 0

    def check(self) -> "Sample":
        """Itself, if it is whole.

        Raises:
            EngineError: it has not one log-probability and version per token, or did not finish by itself.
        """
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise EngineError(
                f"an engine gave {len(self.token_ids)} tokens with {len(self.logprobs)} log-probabilities and"
                f" {len(self.versions)} versions")
        if self.finish_reason not in ("stop", "length"):
            raise EngineError(f"an engine ended a sample with {self.finish_reason!r}")
        return self
