"""Messages to and from the process of a reward model. Torch-free: `rollout.model_reward` sends them."""

from dataclasses import dataclass
from typing import Literal

from offbeat.data.row import Prompt


@dataclass(frozen=True)
class RewardModelOptions:
    """Settings for loading a reward model.

    Attributes:
        model: folder or hub id of a sequence classifier with one label.
        system_prompt: message before each prompt that has no system message and that its chat template renders; "" for none.
        max_tokens: largest number of tokens of one forward pass.
    """

    model: str
    dtype: Literal["float32", "bfloat16"]
    system_prompt: str
    max_tokens: int


@dataclass(frozen=True)
class TextsToScore:
    """Prompts, each with an answer to score."""

    prompts: tuple[Prompt, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class ScoredTexts:
    """The reward of each text, and the reason why it has none; empty if it has one."""

    rewards: tuple[float, ...]
    failures: tuple[str, ...]
