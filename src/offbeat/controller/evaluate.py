"""Held-out accuracy, through the same engines and rewards that training uses."""

from dataclasses import dataclass, field, replace
from math import comb
from statistics import fmean

from offbeat.aio import deadline
from offbeat.config.controller import EvaluateConfig
from offbeat.controller.parts import Peers, Rollouts
from offbeat.data.dataset import PromptDataset
from offbeat.data.trajectory import episode_reward
from offbeat.errors import RolloutError


@dataclass(frozen=True)
class Evaluation:
    """One evaluation.

    Attributes:
        accuracy: share of samples that have a reward of at least 1, mean over the prompts.
        reward_mean: mean reward of the samples; one that could not be scored has 0.
        num_prompts: prompts scored.
        num_failed: prompts of which no sample could be scored; they count as wrong.
        pass_at: by k, the chance that one of k samples of a prompt is right, mean over the prompts.
    """

    accuracy: float
    reward_mean: float
    num_prompts: int
    num_failed: int
    pass_at: dict[int, float] = field(default_factory=dict)

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
        low, high = self.interval
        return {
            "eval/accuracy": self.accuracy, "eval/accuracy_low": low, "eval/accuracy_high": high, "eval/reward_mean": self.reward_mean,
            "eval/failed_prompts": float(self.num_failed), **self.passed}

    @property
    def passed(self) -> dict[str, float]:
        """Metrics of `pass_at` by name."""
        return {f"eval/pass_at_{k}": share for k, share in self.pass_at.items()}

    @property
    def passed_text(self) -> str:
        """What is added to a sentence on the accuracy; empty without `pass_at`."""
        return "".join(f", pass@{k} {share:.3f}" for k, share in self.pass_at.items())

    def __str__(self) -> str:
        low, high = self.interval
        return f"held-out accuracy {self.accuracy:.3f} ({low:.3f} to {high:.3f} with 95 % confidence){self.passed_text}"


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return an unbiased estimate of the chance that one of k samples is right, of n = `num_samples` of which `num_right` are.

    It is the share of the choices of k from n that hold a right one. Source: Chen et al. 2021, arXiv:2107.03374.
    """
    return 1 - comb(num_samples - num_right, k) / comb(num_samples, k)


class Evaluator:
    """Evaluates the weights that the engines serve."""

    def __init__(self, rollouts: Rollouts, heldout: PromptDataset, config: EvaluateConfig, peers: Peers) -> None:
        self._rollouts = rollouts
        self._config = config
        self._peers = peers
        count = min(config.num_prompts, heldout.num_rows or 0)
        self._rows = [heldout.row(index) for index in range(count)]
        self._sampling = replace(rollouts.sampling, temperature=config.temperature)

    def due(self, global_step: int, *, last: bool) -> bool:
        """Whether to evaluate after this step."""
        every = self._config.every_steps
        return bool(self._rows) and (last or (every > 0 and global_step % every == 0))

    async def run(self) -> Evaluation:
        """Complete and score every held-out prompt; the leader does, and all peers get the result.

        Raises:
            DeadlineError: it took longer than `evaluate.timeout_s`.
            RolloutError: not a single prompt could be scored; shows the first reason.
        """
        evaluation = await self._peers.lead("evaluate_fn", self._play, Evaluation)
        await self._peers.meet("evaluate")
        return evaluation

    async def _play(self) -> Evaluation:
        num_samples = self._config.samples_per_prompt
        async with deadline("evaluation", self._config.timeout_s):
            groups = await self._rollouts.rollout_batch(self._rows, group_size=num_samples, sampling=self._sampling)
        rewards = [[episode_reward(chains) for chains in group.usable_episodes] for group in groups]
        num_failed = sum(not of_prompt for of_prompt in rewards)
        if num_failed == len(groups):
            why = groups[0].rejected or groups[0].verdicts[0].reason
            raise RolloutError(f"none of {len(groups)} held-out prompts could be evaluated; the first because of {why}")
        num_right = [sum(reward >= 1 for reward in of_prompt) for of_prompt in rewards]
        return Evaluation(
            fmean(right / num_samples for right in num_right), fmean(sum(of_prompt) / num_samples for of_prompt in rewards), len(groups),
            num_failed, {k: fmean(pass_at_k(num_samples, right, k) for right in num_right) for k in self._config.pass_at})
