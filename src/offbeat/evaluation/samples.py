"""Answers of an evaluation with their rewards and texts, as they are kept for readers, own metrics and comparisons. Frozen; no torch."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from offbeat.data.reward import RIGHT
from offbeat.data.row import Row
from offbeat.data.trajectory import Group, Trajectory, episode_reward, parts_of
from offbeat.errors import RolloutError

if TYPE_CHECKING:
    from offbeat.data.tokenizer import Tokenizer  # takes a second to load; readers of results do not need it

_KEY_LENGTH = 16


@dataclass(frozen=True)
class EpisodeTurn:
    """A piece of an episode of several turns: a text that the model wrote, or was given after its prompt; `agent` is the model's role."""

    text: str
    written: bool
    agent: str = ""


@dataclass(frozen=True)
class EvaluatedSample:
    """One answer to a prompt: an episode.

    Attributes:
        text: the model's text, without special tokens; the turns of a longer episode are parted by line breaks.
        reward: None where there is none, as `reason` says; it counts as 0 and wrong.
        reason: why the episode ended, "stop" or "length"; or why it could not be scored.
        num_tokens: tokens that the model wrote.
        rewards: the rewards by name that add up to the reward, such as {"math": 1.0, "format": 0.1}; empty without names.
        by_agent: the reward of each agent by its role; empty where a single one without a name plays.
        turns: pieces after the prompt, in order, chain by chain; empty for one answer to one prompt.
    """

    text: str
    reward: float | None
    reason: str = "stop"
    num_tokens: int = 0
    rewards: dict[str, float] = field(default_factory=dict)
    by_agent: dict[str, float] = field(default_factory=dict)
    turns: tuple[EpisodeTurn, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether its reward is at least 1."""
        return self.reward is not None and self.reward >= RIGHT


@dataclass(frozen=True)
class MetricSample:
    """One answer as a metric of the user's own gets it; see `EvaluatedSample`.

    Attributes:
        index: number of the prompt in its set, from 0; the answers to a prompt have the same.
        row: the prompt, its reference answer, and other fields.
    """

    index: int
    row: Row
    text: str
    reward: float | None
    reason: str
    num_tokens: int
    rewards: dict[str, float]
    by_agent: dict[str, float]
    turns: tuple[EpisodeTurn, ...]

    @property
    def is_right(self) -> bool:
        """Whether its reward is at least 1."""
        return self.reward is not None and self.reward >= RIGHT


@dataclass(frozen=True)
class EvaluatedPrompt:
    """A prompt and its answers.

    Attributes:
        samples: empty where none could be sampled.
        failure: why there are none.
        images: SHA-256 of the file of each image of the prompt.
    """

    row: Row
    samples: tuple[EvaluatedSample, ...] = ()
    failure: str = ""
    images: tuple[str, ...] = ()

    @cached_property
    def key(self) -> str:
        """Digest of the prompt, its images and its reference answer, by which two evaluations know that they asked the same."""
        images = [self.images] if self.images else []
        asked = json.dumps([self.row.shown_prompt, self.row.answer, *images], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(asked.encode(errors="surrogatepass")).hexdigest()[:_KEY_LENGTH]

    @property
    def failed(self) -> bool:
        """Whether none of its answers could be scored."""
        return all(sample.reward is None for sample in self.samples)

    @property
    def why_failed(self) -> str:
        """The reason of the first answer that could not be scored, or why there is no answer."""
        return self.failure or next((sample.reason for sample in self.samples if sample.reward is None), "")


@dataclass(frozen=True)
class EvaluatedSet:
    """All answers on one evaluation set.

    Attributes:
        name: of the set; "" for held-out prompts.
        num_samples: number of answers requested for each prompt; a missing one counts as wrong.
        pass_at: numbers k for which pass@k is reported.
    """

    name: str
    num_samples: int
    prompts: tuple[EvaluatedPrompt, ...]
    pass_at: tuple[int, ...] = ()

    @property
    def samples(self) -> tuple[MetricSample, ...]:
        """All answers, prompt by prompt."""
        return tuple(
            MetricSample(index, prompt.row, each.text, each.reward, each.reason, each.num_tokens, each.rewards, each.by_agent, each.turns)
            for index, prompt in enumerate(self.prompts) for each in prompt.samples)

    @property
    def title(self) -> str:
        """Name of the set for people, such as "held-out"."""
        return self.name or "held-out"

    @cached_property
    def num_right(self) -> np.ndarray:
        """Right answers to each prompt, [P] int."""
        return np.array([sum(sample.is_right for sample in prompt.samples) for prompt in self.prompts], int)

    @property
    def accuracies(self) -> np.ndarray:
        """Share of right answers to each prompt, [P] float."""
        return self.num_right / self.num_samples

    @cached_property
    def rewards(self) -> np.ndarray:
        """Mean reward of the answers to each prompt, [P] float."""
        return np.array([sum(sample.reward or 0.0 for sample in prompt.samples) / self.num_samples for prompt in self.prompts], float)


def check_answered(played: EvaluatedSet) -> EvaluatedSet:
    """Return the set; raises RolloutError, with the first reason, if not a single one of its prompts could be scored."""
    if all(prompt.failed for prompt in played.prompts):
        which = f"prompts of the evaluation set {played.name!r}" if played.name else "held-out prompts"
        why = played.prompts[0].why_failed
        raise RolloutError(f"none of {len(played.prompts)} {which} could be evaluated; the first because of {why}")
    return played


def read_group(row: Row, group: Group, tokenizer: "Tokenizer") -> EvaluatedPrompt:
    """Return a played prompt with the texts of its episodes."""
    samples = tuple(_sample(chains, tokenizer) for chains in group.episodes)
    return EvaluatedPrompt(row, samples, group.rejected or "", tuple(image.digest for image in row.images))


def _sample(chains: Sequence[Trajectory], tokenizer: "Tokenizer") -> EvaluatedSample:
    unusable = next((t for t in chains if t.unusable is not None), None)
    turns = [turn for trajectory in chains for turn in _turns(trajectory, tokenizer)]
    written = [turn.text for turn in turns if turn.written]
    text, num_tokens = "\n".join(written), sum(t.num_generated for t in chains)
    several = len(turns) > 1 or any(t.agent for t in chains)
    kept = tuple(turns) if several else ()
    if unusable is not None:
        return EvaluatedSample(text, None, unusable.reason, num_tokens, turns=kept)
    parts = parts_of(chains)
    named = {name: value for part in parts for name, value in part.chains[0].named_rewards.items()} if len(parts) == 1 else {}
    agents = {part.agent: part.reward for part in parts}
    return EvaluatedSample(text, episode_reward(chains), chains[-1].reason, num_tokens, named, {} if list(agents) == [""] else agents, kept)


def _turns(trajectory: Trajectory, tokenizer: "Tokenizer") -> list[EpisodeTurn]:
    """Return the pieces after a trajectory's prompt, given and written ones in turn."""
    tokens, mask = trajectory.tokens[trajectory.prompt_len:], trajectory.loss_mask[trajectory.prompt_len:]
    if not len(tokens):
        return []
    ends = [*(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(tokens)]
    return [
        EpisodeTurn(tokenizer.decode_continuation(tokens[begin:end].tolist()), bool(mask[begin]), trajectory.agent)
        for begin, end in zip([0, *ends], ends, strict=False)]
