"""What was trained by a run of two steps with an agent."""

from dataclasses import dataclass
from typing import Any

from offbeat.data.tokenizer import Tokenizer
from small_run import SmallRun

Chain = dict[str, Any]


@dataclass(frozen=True)
class Trained:
    """A finished run, with the tokenizer of its model."""

    run: SmallRun
    tokenizer: Tokenizer

    def chains(self, step: int) -> list[Chain]:
        """The trajectories of a step."""
        return [chain for group in self.run.groups(step) for chain in group["trajectories"]]

    def episodes(self) -> list[list[Chain]]:
        """The trajectories of each episode of both steps."""
        found: dict[tuple[int, int], list[Chain]] = {}
        for step in (1, 2):
            for chain in self.chains(step):
                found.setdefault((step, chain["episode"]), []).append(chain)
        return list(found.values())

    def text(self, chain: Chain, *, sampled: bool) -> str:
        """The tokens that the model sampled, or the others, as text with special tokens."""
        tokens = [token for token, mask in zip(chain["tokens"], chain["loss_mask"], strict=True) if mask == sampled]
        return self.tokenizer.decode(tokens, skip_special_tokens=False)
