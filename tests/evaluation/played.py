"""Evaluated sets made of rewards."""

from collections.abc import Sequence

from offbeat.data.row import Row
from offbeat.evaluation.samples import EvaluatedPrompt, EvaluatedSample, EvaluatedSet


def played(
    rewards: Sequence[Sequence[float | None]], *, name: str = "", num_samples: int = 0, pass_at: tuple[int, ...] = (), first: int = 0,
) -> EvaluatedSet:
    """A set whose prompts, "0>" and on, or from `first`, have answers with these rewards; None could not be scored."""
    prompts = tuple(
        EvaluatedPrompt(
            Row(f"{number}>", str(number)),
            tuple(EvaluatedSample(f"answer {i}", each, "stop" if each is not None else "reward failed: no") for i, each in enumerate(own)))
        for number, own in enumerate(rewards, first))
    return EvaluatedSet(name, num_samples or len(rewards[0]), prompts, pass_at)
