"""Rollouts of a process: brings together engines, rewards and data. Torch-free.

Opened by the controller, by rank 0 in SPMD mode, and by every other rank that rolls out on rank 0's engines.
"""

from collections.abc import Awaitable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from offbeat.aio import HaltingClock
from offbeat.algorithms.experience import sft_batch
from offbeat.config.agent import PLAYS
from offbeat.config.engine_kinds import ENGINE_KINDS
from offbeat.config.root import Config
from offbeat.controller.diagnosis import IdleAdvice
from offbeat.controller.inputs import RunInputs
from offbeat.controller.parts import Rollouts
from offbeat.data.batch import Batch
from offbeat.data.pieces import Pieces
from offbeat.data.prompt import check_length, render
from offbeat.data.row import Row
from offbeat.data.stream import PromptStream
from offbeat.errors import TooLongError
from offbeat.fleet.publishers import OnServed
from offbeat.inference.sampling import Sample, Sampling
from offbeat.journal.run_journal import NoJournal
from offbeat.rollout.accounts import Accounts
from offbeat.rollout.dynamic import DynamicSampling
from offbeat.rollout.episode import Episode, Generate
from offbeat.rollout.executor import RolloutExecutor
from offbeat.rollout.idle import IdleMeter
from offbeat.rollout.player import RolloutParts, accept_all
from offbeat.rollout.staleness import Gate
from offbeat.rollout.trajectory_checks import TrajectoryChecks
from offbeat.runs.recorded_rollouts import RecordedRollouts
from offbeat.runs.run_code import UserCode
from offbeat.telemetry.record import RunRecord
from offbeat.types import Version
from offbeat.user_code.functions import resolve


@dataclass(frozen=True)
class EngineRollouts:
    """The `RolloutSource` on the engines that `generate` routes to.

    Attributes:
        engines: the clock that stands still while the engines sleep.
        journal: hears of the groups that feed training.
        meters: idle meters of the executors that feed training; calls for evaluation sets count, too, as they keep the same engines busy.
    """

    config: Config
    record: RunRecord
    inputs: RunInputs
    generate: Generate
    user_code: UserCode
    engines: HaltingClock = field(default_factory=HaltingClock)
    journal: NoJournal = field(default_factory=NoJournal)
    meters: list[IdleMeter] = field(default_factory=list)

    draws = True

    def rollouts(self, stream: PromptStream, *, version: Version, last_version: Version, num_flat_rejected: int = 0) -> RolloutExecutor:
        """Create an executor that feeds the training steps from `version` to `last_version`; see `RolloutSource.rollouts`."""
        config = self.config.timed_rollout
        gate = Gate(
            batch_size=config.consumer_batch_size, max_running=config.max_concurrent_rollouts, eta=config.max_head_offpolicyness,
            version=version, last_version=last_version, on_stale=config.on_stale)
        listener = RecordedRollouts(
            self.record, stream, Pieces(self.inputs.tokenizer), keeps_rejected=bool(self.config.telemetry.rollouts_every_steps),
            journal=self.journal)
        executor = RolloutExecutor(
            gate, stream, self._parts(num_flat_rejected), config=config, sampling=self.inputs.sampling, listener=listener,
            idle_listener=IdleAdvice(self.record, self.config))
        self.meters.append(executor.idle)
        return executor

    def _parts(self, num_flat_rejected: int) -> RolloutParts:
        config, record = self.config, self.record
        return RolloutParts(
            workflow=self.user_code.workflow,
            make_episode=self._episode,
            accept=resolve(config.rollout.should_accept, kind="should_accept") if config.rollout.should_accept else accept_all,
            dynamic=self._dynamic_sampling(num_flat_rejected),
            checks=TrajectoryChecks(
                self.inputs.vocab_size, max_row_tokens=config.train.max_tokens_per_microbatch, context=self.inputs.context),
            accounts=Accounts(record.tracer.add if config.telemetry.trace else None, tell=record.console.note),
            has_places=config.rollout.workflow in PLAYS,
            engines=self.engines,
            seed=config.run.seed if config.inference.seeded_requests else None,
            running_s=self._running_s)

    def _dynamic_sampling(self, num_flat_rejected: int) -> DynamicSampling | None:
        if not self.config.algorithm.dynamic_sampling:
            return None
        return DynamicSampling(
            self.config.algorithm, batch_size=self.config.rollout.consumer_batch_size, num_rejected=num_flat_rejected,
            warn=partial(self.record.note, "dynamic_sampling"))

    @property
    def _running_s(self) -> float:
        """Seconds between two records of the tokens of running samples; 0 where they are not recorded."""
        checkpoint, kind = self.config.checkpoint, ENGINE_KINDS[self.config.inference.engine]
        return checkpoint.journal_running_s if checkpoint.journal and kind.goes_on else 0.0

    def rollouts_of_set(self, name: str) -> RolloutExecutor:
        """See `RolloutSource.rollouts_of_set`. A process without user code of the set must not play it."""
        of_set = replace(
            self, generate=self._generate_beside, meters=[], journal=NoJournal(), config=self.config.evaluation_set(name),
            inputs=self.inputs.sets[name], user_code=self.user_code.sets.get(name, self.user_code))
        return of_set.rollouts(PromptStream(of_set.inputs.train, seed=0), version=0, last_version=0)

    async def _generate_beside(self, prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> list[Sample]:
        """Generate samples that are not for training; see `Generate`."""
        with ExitStack() as calls:
            for meter in self.meters:
                calls.enter_context(meter.calling())
            return await self.generate(prompt, sampling, n=n, session=session)

    def sft_batch(self, stream: PromptStream, count: int) -> Batch:
        return sft_batch(self.inputs.supervision.draw(stream, count))

    def _episode(self, row: Row, group_size: int, sampling: Sampling) -> Episode:
        inputs = self.inputs
        prompt = tuple(render(row, inputs.tokenizer, self.config.data))
        check_length(
            len(prompt), self.config.data, name=repr(str(row.prompt)[:40]), context=inputs.context, max_new_tokens=sampling.max_new_tokens)
        return Episode(
            row=row, prompt=prompt, group_size=group_size, sampling=sampling, generate=self._generate, score=self.user_code.rewards.score,
            tokenizer=inputs.tokenizer, context=inputs.context)

    def _generate(self, prompt: tuple[int, ...], sampling: Sampling, *, n: int, session: str = "") -> Awaitable[list[Sample]]:
        """Generate samples; see `Generate`. Raises TooLongError where an engine would refuse because the context is too short."""
        if len(prompt) + sampling.max_new_tokens > self.inputs.context:
            raise TooLongError(
                f"a prompt of {len(prompt)} tokens and max_new_tokens = {sampling.max_new_tokens} are more than the context of"
                f" {self.inputs.context}; a workflow of several turns has to stop before that")
        return self.generate(prompt, sampling, n=n, session=session)


@dataclass(frozen=True)
class NoEngines:
    """The `Publishing` and the `RolloutSource` of a run without engines, such as preference training; publishing does nothing."""

    draws: bool

    async def publish(self, version: Version, *, on_served: OnServed) -> None:
        """See `Publishing.publish`."""

    async def settle(self, *, behind: int = 0) -> None:
        """See `Publishing.settle`."""

    async def watch(self) -> None:
        """Watch nothing; see `Publishing.watch`."""

    def rollouts(
        self, stream: PromptStream, *, version: Version, last_version: Version, num_flat_rejected: int = 0,  # noqa: ARG002
    ) -> Rollouts:
        raise AssertionError("a run without engines was asked for rollouts")

    def rollouts_of_set(self, name: str) -> Rollouts:
        raise AssertionError(f"a run without engines was asked to play {name}")

    def sft_batch(self, stream: PromptStream, count: int) -> Batch:  # noqa: ARG002
        raise AssertionError("a run without engines was asked to imitate")
