"""The part of a training step that the ranks compute: scores of its batch, and the updates of critic and policy.

Called by the loop, and by `recovery` for steps that are redone. In SPMD mode every rank calls it.
"""

import asyncio
from collections.abc import Sequence

from offbeat.algorithms.critic import critic_batch
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.critic import CriticConfig
from offbeat.controller.parts import RunParts
from offbeat.controller.scoring import ScoredBatch, score_batch
from offbeat.controller.state import LoopStep
from offbeat.data.batch import Batch
from offbeat.data.stream import PromptStream
from offbeat.data.trajectory import Group


class StepTraining:
    """Scores and trains on the batches of a run's steps."""

    def __init__(self, parts: RunParts, stream: PromptStream, *, num_minibatches: int, critic: CriticConfig, seed: int) -> None:
        """`stream` knows the rows that groups were drawn from; `seed` is the run's."""
        self._parts = parts
        self._stream = stream
        self._num_minibatches = num_minibatches
        self._critic = critic
        self._seed = seed

    async def score(self, batch: Batch, groups: Sequence[Group], step: LoopStep, algorithm: AlgorithmConfig) -> ScoredBatch:
        """Add the scores that the algorithm needs to the batch of these groups; see `score_batch`."""
        if not algorithm.needs_scores:
            return ScoredBatch(batch)
        return await score_batch(
            batch, self._parts, algorithm, seed=self._seed + step.global_step,
            row_of=lambda group: self._stream.row(groups[group].prompt_id))

    async def train(self, batch: Batch, step: LoopStep) -> dict[str, float]:
        """Train the critic, if there is one, and after its warm-up the policy; returns metrics."""
        critic, stats = self._parts.critic, {}
        if critic is not None:
            learnt = await asyncio.to_thread(critic_batch, batch, value_clip=self._critic.value_clip)
            found = await critic.train_step(learnt, num_minibatches=self._num_minibatches)
            stats = {name.replace("train/", "critic/"): value for name, value in found.items()}
            if step.global_step <= self._critic.warmup_steps:
                return {"train/tokens": stats.pop("critic/tokens"), **stats}
            del stats["critic/tokens"]
        return stats | await self._parts.trainers.train_step(batch, num_minibatches=self._num_minibatches)
