"""Held-out accuracy, through the same engines and rewards that training uses."""

from dataclasses import dataclass, replace

import numpy as np

from offbeat.aio import deadline
from offbeat.config.controller import EvaluateConfig
from offbeat.controller.parts import Peers, Rollouts
from offbeat.data.dataset import PromptDataset
from offbeat.errors import RolloutError


@dataclass(frozen=True)
class Evaluation:
    """One evaluation.

    Attributes:
        accuracy: share of prompts whose completion has a reward of at least 1.
        reward_mean: mean reward.
        num_prompts: prompts scored.
        num_failed: prompts that could not be scored; they count as wrong.
    """

    accuracy: float
    reward_mean: float
    num_prompts: int
    num_failed: int

    @property
    def interval(self) -> tuple[float, float]:
        """The accuracy on all prompts of this kind, with 95 % confidence. Source: Wilson 1927."""
        n, z = self.num_prompts, 1.959964
        centre = (self.accuracy + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * (self.accuracy * (1 - self.accuracy) / n + z * z / (4 * n * n)) ** 0.5
        return centre - half, centre + half

    def metrics(self) -> dict[str, float]:
        low, high = self.interval
        return {
            "eval/accuracy": self.accuracy, "eval/accuracy_low": low, "eval/accuracy_high": high, "eval/reward_mean": self.reward_mean,
            "eval/failed_prompts": float(self.num_failed)}

    def __str__(self) -> str:
        low, high = self.interval
        return f"held-out accuracy {self.accuracy:.3f} ({low:.3f} to {high:.3f} with 95 % confidence)"


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
        async with deadline("evaluation", self._config.timeout_s):
            groups = await self._rollouts.rollout_batch(self._rows, group_size=1, sampling=self._sampling)
        num_failed = sum(not group.usable for group in groups)
        if num_failed == len(groups):
            why = groups[0].rejected or groups[0].trajectories[0].reason
            raise RolloutError(f"none of {len(groups)} held-out prompts could be evaluated; the first because of {why}")
        rewards = np.array([group.usable[0].reward if group.usable else 0.0 for group in groups])
        return Evaluation(float(np.mean(rewards >= 1)), float(rewards.mean()), len(groups), num_failed)
