"""Scores of one evaluation of one set, under the names of metrics. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb

import numpy as np

from offbeat.data.reward import RIGHT
from offbeat.evaluation.intervals import Interval, mean_interval, share_interval
from offbeat.evaluation.samples import EvaluatedPrompt, EvaluatedSet


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of one set.

    Attributes:
        accuracy: share of samples that have a reward of at least 1, mean over the prompts; of k samples per prompt, it is mean@k.
        reward_mean: mean reward of the samples; one that could not be scored has 0.
        num_prompts: prompts scored.
        num_failed: prompts of which no sample could be scored; they count as wrong.
        pass_at: by k, the chance that one of k samples of a prompt is right, mean over the prompts; such as {1: 0.41, 4: 0.7}.
        name: of the set; "" for the run's held-out prompts.
        by_agent: accuracy of each agent by its role, where several play an episode; one that has no part in a sample is wrong there.
        intervals: 95 % confidence intervals over prompts, by the names of metrics: accuracy, reward_mean and pass_at_K.
        own: values of the set's own metric, by name.
        own_failure: why the set's own metric has no values.
    """

    accuracy: float
    reward_mean: float
    num_prompts: int
    num_failed: int
    pass_at: dict[int, float] = field(default_factory=dict)
    name: str = ""
    by_agent: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, Interval] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=dict)
    own_failure: str = ""

    @property
    def interval(self) -> Interval:
        """The accuracy on all prompts of this kind, with 95 % confidence; see `share_interval`."""
        return self.intervals["accuracy"]

    def metrics(self) -> dict[str, float]:
        """All values by the names of metrics, such as {"eval/accuracy": 0.41, "eval/accuracy_low": 0.35}."""
        named = {
            "accuracy": self.accuracy, "reward_mean": self.reward_mean, "failed_prompts": float(self.num_failed),
            **{f"pass_at_{k}": share for k, share in self.pass_at.items()},
            **{f"accuracy/{agent}": share for agent, share in self.by_agent.items()}}
        for name, (low, high) in self.intervals.items():
            named |= {f"{name}_low": low, f"{name}_high": high}
        return {f"{self.folder}/{name}": value for name, value in (named | self.own).items()}

    @property
    def folder(self) -> str:
        """Beginning of the names of its metrics, such as "eval/gsm8k"; "eval" for the held-out prompts."""
        return f"eval/{self.name}" if self.name else "eval"

    def with_own(self, found: Mapping[str, float], *, failure: str = "") -> "Evaluation":
        """Return it with the values of the set's own metric, or the reason why it has none."""
        return replace(self, own=dict(found), own_failure=failure)

    @property
    def title(self) -> str:
        """The first words of a sentence on the accuracy, such as "accuracy on gsm8k"."""
        return f"accuracy on {self.name}" if self.name else "held-out accuracy"

    @property
    def shares(self) -> dict[str, float]:
        """All shares but the accuracy, under names for people, such as {"pass@4": 0.7}."""
        return {f"pass@{k}": share for k, share in self.pass_at.items()} | {
            agent or "unnamed": share for agent, share in self.by_agent.items()} | self.own

    @property
    def shares_text(self) -> str:
        """The shares as the end of a sentence on the accuracy, such as ", pass@4 0.700"; empty if there are none."""
        return "".join(f", {name} {share:.3f}" for name, share in self.shares.items())

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.title} {self.accuracy:.3f} ({low:.3f} to {high:.3f} with 95 % confidence){self.shares_text}"


def score_set(played: EvaluatedSet) -> Evaluation:
    """Return the scores of an answered set with at least one prompt."""
    shares = {k: pass_at_k_of_each(played, k) for k in played.pass_at}
    intervals = {
        "accuracy": share_interval(played.accuracies, num_samples=played.num_samples),
        "reward_mean": mean_interval(played.rewards),
        **{f"pass_at_{k}": share_interval(values, num_samples=played.num_samples) for k, values in shares.items()}}
    return Evaluation(
        float(played.accuracies.mean()), float(played.rewards.mean()), len(played.prompts),
        sum(prompt.failed for prompt in played.prompts), {k: float(values.mean()) for k, values in shares.items()}, played.name,
        accuracy_by_agent(played.prompts, num_samples=played.num_samples), intervals)


def pass_at_k_of_each(played: EvaluatedSet, k: int) -> np.ndarray:
    """Return the estimate of pass@k of each prompt, [P] float."""
    return np.array([pass_at_k(played.num_samples, int(right), k) for right in played.num_right], float)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return an unbiased estimate of the chance that one of k samples is right, of n = `num_samples` of which `num_right` are.

    It is the share of the choices of k from n that hold a right one. Source: Chen et al. 2021, arXiv:2107.03374.
    """
    return 1 - comb(num_samples - num_right, k) / comb(num_samples, k)


def accuracy_by_agent(prompts: Sequence[EvaluatedPrompt], *, num_samples: int) -> dict[str, float]:
    """Return the share of samples in which each agent has a reward of at least 1, by its role; empty where no two play an episode."""
    played = [sample.by_agent for prompt in prompts for sample in prompt.samples if sample.reward is not None]
    if all(len(agents) <= 1 for agents in played):
        return {}
    return {
        agent: sum(agents.get(agent, -np.inf) >= RIGHT for agents in played) / (len(prompts) * num_samples)
        for agent in sorted({agent for agents in played for agent in agents})}
