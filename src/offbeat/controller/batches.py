"""The batches of a run's steps, each made when its step begins, or ahead of time, while the step before it trains.

Called by the loop, whose docstring lists the concurrent parts. Batches are made on a thread, so that answers of engines are read meanwhile.
"""

import asyncio
from collections.abc import Sequence
from typing import Self

from offbeat.aio import cancelled
from offbeat.algorithms.experience import batch_stats, make_batch
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.controller.own_code import with_credit
from offbeat.controller.parts import Rollouts, RunParts
from offbeat.controller.state import LoopStep
from offbeat.data.batch import Batch
from offbeat.data.trajectory import Group
from offbeat.telemetry.tracker import StatsPart
from offbeat.user_code.functions import at_step

MadeBatch = tuple[Batch, StatsPart]
"""A batch, and the statistics of its groups."""


class StepBatches:
    """Makes one run's batches. Use as `async with`; on leaving, a batch that is being made ahead is cancelled."""

    def __init__(self, parts: RunParts, *, max_new_tokens: int, timeout_s: float) -> None:
        """`max_new_tokens` are the most of an answer; the user's own credit has `timeout_s` for a batch."""
        self._parts = parts
        self._max_new_tokens = max_new_tokens
        self._timeout_s = timeout_s
        self._ahead: asyncio.Task[MadeBatch] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._ahead is not None:
            await cancelled(self._ahead)

    async def cancel_idle(self, rollouts: Rollouts) -> None:
        """Cancel `make_ahead` if no groups were released for it: the step that begins now must not wait for it."""
        if self._ahead is not None and not rollouts.has_ahead:
            await cancelled(self._ahead)
            self._ahead = None

    async def take(self, groups: Sequence[Group], step: LoopStep, algorithm: AlgorithmConfig) -> MadeBatch:
        """Return the batch of a step's groups: the one made ahead, or else a new one."""
        if self._ahead is None:
            return await self._make(groups, step, algorithm)
        made = await self._ahead
        self._ahead = None
        return made

    def make_ahead(self, step: LoopStep, rollouts: Rollouts, algorithm: AlgorithmConfig) -> None:
        """Begin to make the batch of a step while the step before it trains, unless its coefficients depend on that step."""
        if not (algorithm.kl_target or algorithm.entropy_target):
            self._ahead = asyncio.create_task(self._make_ahead(step, rollouts, algorithm), name="make_ahead")

    async def _make_ahead(self, step: LoopStep, rollouts: Rollouts, algorithm: AlgorithmConfig) -> MadeBatch:
        """Make the batch, and distribute it over the ranks if neither scores nor a critic add to it before it is trained on."""
        groups = await rollouts.take_ahead()
        with self._parts.record.tracer.span("make_ahead", "controller, ahead", step=step.global_step):
            batch, stats = await self._make(groups, step, algorithm)
            if not algorithm.needs_scores and self._parts.critic is None:
                await self._parts.trainers.spread_ahead(batch, num_minibatches=algorithm.num_minibatches)
        return batch, stats

    async def _make(self, groups: Sequence[Group], step: LoopStep, algorithm: AlgorithmConfig) -> MadeBatch:

        def make() -> MadeBatch:
            with at_step(step.global_step):
                batch = make_batch(groups, config=algorithm, max_new_tokens=self._max_new_tokens)
            return batch, batch_stats(groups, version=step.version, config=algorithm)

        if algorithm.credit:
            return await with_credit(make, credit=algorithm.credit, step=step.global_step, timeout_s=self._timeout_s)
        return await asyncio.to_thread(make)
