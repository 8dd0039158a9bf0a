"""Accuracy on held-out prompts and on evaluation sets, through the same engines that training uses.

The run's held-out prompts are a set without a name, and are played and judged as in training; each set with a name has a workflow, rewards
and sampling of its own (`config.evaluation_sets`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import comb
from statistics import fmean

from offbeat.aio import deadline
from offbeat.config.controller import EvaluateConfig
from offbeat.config.root import Config
from offbeat.controller.inputs import RunInputs
from offbeat.controller.parts import Peers, Rollouts, RolloutSource
from offbeat.data.dataset import PromptDataset
from offbeat.data.reward import RIGHT
from offbeat.data.trajectory import Group, episode_reward, parts_of
from offbeat.errors import RolloutError


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of one set.

    Attributes:
        accuracy: share of samples that have a reward of at least 1, mean over the prompts; of k samples per prompt, it is mean@k.
        reward_mean: mean reward of the samples; one that could not be scored has 0.
        num_prompts: prompts scored.
        num_failed: prompts of which no sample could be scored; they count as wrong.
        pass_at: by k, the chance that one of k samples of a prompt is right, mean over the prompts.
        name: of the set; "" for the run's held-out prompts.
        by_agent: accuracy of each agent by its role, where several play an episode; one that has no part in a sample is wrong there.
    """

    accuracy: float
    reward_mean: float
    num_prompts: int
    num_failed: int
    pass_at: dict[int, float] = field(default_factory=dict)
    name: str = ""
    by_agent: dict[str, float] = field(default_factory=dict)

    @property
    def interval(self) -> tuple[float, float]:
        """The accuracy on all prompts of this kind, with at least 95 % confidence. Source: Wilson 1927.

        It counts prompts: several samples of one say more of that prompt, and little of others.
        """
        n, z = self.num_prompts, 1.959964
        centre = (self.accuracy + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * (self.accuracy * (1 - self.accuracy) / n + z * z / (4 * n * n)) ** 0.5
        return centre - half, centre + half

    def metrics(self) -> dict[str, float]:
        """Everything by the names of metrics."""
        low, high = self.interval
        return self._named({
            "accuracy": self.accuracy, "accuracy_low": low, "accuracy_high": high, "reward_mean": self.reward_mean,
            "failed_prompts": float(self.num_failed), **self._named_shares})

    @property
    def step_metrics(self) -> dict[str, float]:
        """What is a metric of a training step: everything of a set, and the shares alone of the run's held-out prompts."""
        return self.metrics() if self.name else self._named({"accuracy": self.accuracy, **self._named_shares})

    def _named(self, values: dict[str, float]) -> dict[str, float]:
        folder = f"eval/{self.name}" if self.name else "eval"
        return {f"{folder}/{name}": value for name, value in values.items()}

    @property
    def _named_shares(self) -> dict[str, float]:
        return {f"pass_at_{k}": share for k, share in self.pass_at.items()} | {
            f"accuracy/{agent}": share for agent, share in self.by_agent.items()}

    @property
    def title(self) -> str:
        """What the accuracy is of, as the first words of a sentence."""
        return f"accuracy on {self.name}" if self.name else "held-out accuracy"

    @property
    def shares(self) -> dict[str, float]:
        """What there is beside the accuracy, by what people call it."""
        return {f"pass@{k}": share for k, share in self.pass_at.items()} | {
            agent or "unnamed": share for agent, share in self.by_agent.items()}

    @property
    def shares_text(self) -> str:
        """What is added to a sentence on the accuracy; empty where there is nothing beside it."""
        return "".join(f", {name} {share:.3f}" for name, share in self.shares.items())

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.title} {self.accuracy:.3f} ({low:.3f} to {high:.3f} with 95 % confidence){self.shares_text}"


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return an unbiased estimate of the chance that one of k samples is right, of n = `num_samples` of which `num_right` are.

    It is the share of the choices of k from n that hold a right one. Source: Chen et al. 2021, arXiv:2107.03374.
    """
    return 1 - comb(num_samples - num_right, k) / comb(num_samples, k)


class Evaluator:
    """Evaluates the weights that the engines serve on one set."""

    def __init__(
        self, rollouts: Rollouts, rows: PromptDataset, config: EvaluateConfig, peers: Peers, *, name: str = "",
    ) -> None:
        """Prepare it; an evaluator of a set without rows is never due.

        Args:
            name: of the set; "" for the run's held-out prompts.
        """
        self._rollouts = rollouts
        self._config = config
        self._peers = peers
        self._name = name
        count = min(config.num_prompts, rows.num_rows or 0)
        self._rows = [rows.row(index) for index in range(count)]
        self._sampling = replace(rollouts.sampling, temperature=config.temperature)

    def due(self, global_step: int, *, last: bool) -> bool:
        """Whether to evaluate after this step."""
        every = self._config.every_steps
        return bool(self._rows) and (last or (every > 0 and global_step % every == 0))

    async def run(self) -> Evaluation:
        """Complete and score every prompt; the leader does, and all peers get the result.

        Raises:
            DeadlineError: it took longer than `evaluate.timeout_s`.
            RolloutError: not a single prompt could be scored; shows the first reason.
        """
        evaluation = await self._peers.lead("evaluate_fn", self._play, Evaluation)
        await self._peers.meet("evaluate")
        return evaluation

    async def _play(self) -> Evaluation:
        num_samples = self._config.samples_per_prompt
        async with deadline(f"evaluation of {self._name}" if self._name else "evaluation", self._config.timeout_s):
            groups = await self._rollouts.rollout_batch(self._rows, group_size=num_samples, sampling=self._sampling)
        rewards = [[episode_reward(chains) for chains in group.usable_episodes] for group in groups]
        num_failed = sum(not of_prompt for of_prompt in rewards)
        if num_failed == len(groups):
            which = f"prompts of the evaluation set {self._name!r}" if self._name else "held-out prompts"
            why = groups[0].rejected or groups[0].verdicts[0].reason
            raise RolloutError(f"none of {len(groups)} {which} could be evaluated; the first because of {why}")
        num_right = [sum(reward >= RIGHT for reward in of_prompt) for of_prompt in rewards]
        return Evaluation(
            fmean(right / num_samples for right in num_right), fmean(sum(of_prompt) / num_samples for of_prompt in rewards), len(groups),
            num_failed, {k: fmean(pass_at_k(num_samples, right, k) for right in num_right) for k in self._config.pass_at}, self._name,
            accuracy_by_agent(groups, num_samples=num_samples))


def accuracy_by_agent(groups: Sequence[Group], *, num_samples: int) -> dict[str, float]:
    """Return the share of samples in which each agent has a reward of at least 1, by its role; empty where no two play an episode."""
    played = [parts_of(chains) for group in groups for chains in group.usable_episodes]
    if all(len(parts) == 1 for parts in played):
        return {}
    rewards = [(part.agent, part.reward) for parts in played for part in parts]
    return {
        agent: sum(reward >= RIGHT for name, reward in rewards if name == agent) / (len(groups) * num_samples)
        for agent in sorted({name for name, _ in rewards})}


def make_evaluators(
    rollouts: Rollouts, source: RolloutSource, inputs: RunInputs, config: Config, peers: Peers,
) -> tuple[Evaluator, ...]:
    """Return the evaluators of the run's held-out prompts, which `rollouts` plays, and of each evaluation set."""
    sets = (
        Evaluator(source.rollouts_of_set(name), of_set.heldout, config.evaluation_set(name).timed_evaluate, peers, name=name)
        for name, of_set in inputs.sets.items())
    return Evaluator(rollouts, inputs.heldout, config.timed_evaluate, peers), *sets
