"""The training loop: the file to read first. One step in single-controller mode, from top to bottom; messages cross the gaps:

    engines 0..E-1               controller                             train ranks 0..R-1
         │ tokens, logprobs, versions │                                        │
         ├──────────── HTTP ─────────▶│ executor: rewards, finished groups     │
         │                            │ gate: which B groups the step takes    │
         │                            │ make_batch: advantages, loss weights   │
         │                            ├── TrainStep: each rank its share ─────▶│ each minibatch: forward and backward of
         │                            │                                        │ its micro-batches; the last one reduces
         │                            │                                        │ gradients over ranks; optimizer step
         │                            │◀── Trained: metrics of all ranks ──────┤
         │                            │ gate: advance, the next step may begin │
         │                            ├── WriteRequest: version, canary ──────▶│ score the canary; rank 0 writes a folder,
         │                            │◀── Written: fingerprint, logprobs ─────┤ or offers a broadcast
         │◀── stage and switch ───────┤ publisher: one Manifest to each        │ the next step, where its groups are there
         ├─── Proof ─────────────────▶│ judge: is it what the trainer wrote?   │ already
         │                            │ gate: serve, which admits prompts      │

Concurrent parts:

    train          consumes batches of groups; produces weights; waits for rollouts, ranks and engines, each under a named deadline
    make_ahead     (controller/batches.py) consumes the groups of the step after the one that trains, as soon as the staleness bound
                   releases them; produces its batch and the shares of the ranks; the next step waits for it, or cancels it where no
                   groups were released
    the executor   (rollout/executor.py) generates all the while, as far ahead as the staleness bound allows
    the publisher  brings versions to the engines beside the loop, each engine at its own pace; a step waits until none is more versions
                   behind than the staleness bound allows, evaluation and checkpoint until all serve the newest
    watch          ends the run when too few engines are alive

With `cluster.take_turns` engines and ranks never compute at the same time: `turns.to_ranks` puts the engines to sleep, and a publish wakes
them once its version is written.

Computations on a whole batch run on a thread, one after another, so that answers of engines are read meanwhile.

The controller holds numpy arrays and sockets, never a tensor: torch is not even imported here. In SPMD mode every rank runs this loop
with objects of its own mode behind the same names; work of the leader alone is done under `peers.lead`.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from offbeat.aio import run_beside, unless
from offbeat.algorithms.coefficients import Coefficients
from offbeat.algorithms.experience import batch_metrics, reference_stats
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.controller.batches import StepBatches
from offbeat.controller.best_model import BestModel
from offbeat.controller.checkpoints import RunCheckpoints
from offbeat.controller.diagnosis import Diagnosis
from offbeat.controller.evaluate import RunEvaluations, make_evaluators
from offbeat.controller.parts import Rollouts, RunParts
from offbeat.controller.recovery import Recovered, StepRecovery, computed_by, finite, state_of
from offbeat.controller.rescue import Rescue
from offbeat.controller.scoring import ScoredBatch
from offbeat.controller.state import Highlights, LoopStep, RunState, SavedState
from offbeat.controller.step_record import StepRecord
from offbeat.controller.step_times import StepTimes
from offbeat.controller.step_training import StepTraining
from offbeat.data.batch import Batch
from offbeat.data.stream import PromptStream
from offbeat.data.trajectory import Group
from offbeat.fleet.publication import PublishReport
from offbeat.journal.records import BatchTaken, StepEnded, StepTrained
from offbeat.phase import phase
from offbeat.telemetry.summary import HELDOUT_FELL
from offbeat.telemetry.tracker import StatsPart, combine
from offbeat.types import Version


@dataclass(frozen=True)
class TrainResult:
    """Result of a run: training steps done over all resumptions, and whether the user asked to stop before the last."""

    steps: int
    highlights: Highlights
    stopped_early: bool


async def train(parts: RunParts, state: RunState, begun: Highlights) -> TrainResult:
    """Train from `state` to its last step, or until it is asked to stop; a run without a checkpoint begins with the highlights `begun`.

    Raises:
        WorkerError: a rank failed or died; names it.
        PublishError: too few engines took a version.
        RolloutError, CodeError: rollouts keep failing.
    """
    state.highlights = begun
    training = _Training(parts, state)
    try:
        return await run_beside(training.run(), parts.watch())
    except Exception as exc:
        if parts.peers.have_heard(exc):
            await training.rescue.save_after_error()
        raise


@dataclass(frozen=True)
class _Done:
    """A step that is done: its groups, its batch with the log-probabilities that were computed for it, and its statistics."""

    groups: list[Group]
    batch: Batch
    stats: dict[str, float]


class _Training:
    """One run's parts, bound together."""

    def __init__(self, parts: RunParts, state: RunState) -> None:
        config = self._config = parts.config
        self._parts = parts
        self._state = state
        self._record = parts.record
        self._batches = StepBatches(parts, max_new_tokens=config.rollout.max_new_tokens, timeout_s=config.train.step_timeout_s)
        self._checkpoints = RunCheckpoints(parts, config.checkpoint)
        self._best = BestModel(state, config.evaluate, self._checkpoints, parts.record)
        self._stream = PromptStream(parts.inputs.train, seed=config.run.seed, shuffle=config.data.shuffle, curriculum=config.curriculum)
        self._training = StepTraining(
            parts, self._stream, num_minibatches=config.algorithm.num_minibatches, critic=config.critic, seed=config.run.seed)
        self._num_flat_rejected = 0
        self._steps = StepRecord(
            parts, self._stream, telemetry=config.telemetry, diagnosis=Diagnosis(config, warm_up_steps=state.highlights.warm_up_steps))
        self._times = StepTimes(parts.record.tracer)
        self._recovery = StepRecovery(
            parts, self._batches, self._training, self._stream, algorithm=config.algorithm, keep=self._steps.keep_rollouts)
        self.rescue = Rescue(parts, state, self._stream, self._checkpoints, Coefficients.of(config.algorithm))

    async def run(self) -> TrainResult:
        parts, state, config = self._parts, self._state, self._config
        if parts.critic is not None:
            await parts.critic.restart_optimizer(config.critic.optimizer, total_steps=config.run.total_steps)
        await parts.trainers.restart_optimizer(config.train.optimizer, total_steps=config.run.total_steps)
        recovered = await self._recovery.run(await self._checkpoints.restore(), state)
        self._stand(recovered.saved)
        if recovered.begins:
            self._record.begin_anew()
        else:
            self._resume(recovered.saved)
            await self._best.export_if_best(state.global_step)  # it may have ended between its checkpoint and this
        await state.agree(parts.peers)
        if state.stopping:
            return self._result()
        with phase("publishing the initial weights"):
            await self._publish(state.version)
            await parts.publisher.settle()  # rollouts begin with it
        rollouts = await self._open_rollouts(recovered)
        evaluators = make_evaluators(rollouts, parts.source, parts.inputs, config, parts.peers, log_dir=self._record.log_dir)
        evaluations = RunEvaluations(parts, state, self._best, evaluators, keeps_samples=config.evaluate.keep_samples)
        self._record.console.start(f"{config.run.name} · {config.algorithm.preset}", config.run.total_steps)
        if recovered.begins and (before := await evaluations.run(0, last=True)):
            self._record.stats.commit(0, 0, 0, before)
            self._steps.advise(before)
        async with rollouts, self._batches, self._steps.timing_first_step() as timer:
            if state.unevaluated is not None:
                stats = {name: math.nan if value is None else value for name, value in state.unevaluated.items()}
                await self._end_step(state.last_step, stats, evaluations, is_saved=True)
            for step in state.steps():
                done = await self._step(step, rollouts)
                timer.cancel()
                if done is None:
                    await self._stop_between_steps()
                    break
                await self._follow(step, done, evaluations)
        if 0 < state.global_step < state.total_steps:
            await self._checkpoints.export()
        if state.highlights.heldout_fell:
            self._record.events.record("advice", text=HELDOUT_FELL)  # which the console shows with the result
        await self._record.stored()
        return self._result()

    async def _open_rollouts(self, recovered: Recovered) -> Rollouts:
        """Open the rollouts and the journal; after steps that were redone, a checkpoint is saved, so that they are not redone again."""
        state = self._state
        rollouts = self.rescue.rollouts = self._parts.source.rollouts(
            self._stream, version=state.version, last_version=state.last_version, num_flat_rejected=self._num_flat_rejected)
        rollouts.take_over(recovered.held)
        if recovered.num_redone:
            await self.rescue.save_step(state.last_step)
        else:
            self.rescue.begin_journal(state.global_step, rollouts)
        return rollouts

    # -- one step, from rollouts to published weights ------------------------------------------------------------------------------------

    async def _step(self, step: LoopStep, rollouts: Rollouts) -> _Done | None:
        """Do one step. None if the user wants the run to stop before there are groups to train on."""
        self._times = StepTimes(self._record.tracer)
        groups = await self._take_groups(step, rollouts)
        if groups is None:
            return None
        with self._times.during("step/train_s", "advantage"):
            batch, own = await self._batches.take(groups, step, self._algorithm)
        scored = await self._score(batch, groups, step)
        trained = await self._train(scored.batch, step, rollouts)
        record = self.rescue.left = partial(self._record_step, step, groups, scored, (trained, own), rollouts)
        with self._times.during("step/publish_s", "publish", version=step.next_version):
            rollouts.advance(step.next_version)
            await self._publish(step.next_version, rollouts)
        return await record()

    @property
    def _algorithm(self) -> AlgorithmConfig:
        """The algorithm with the coefficients of the step in hand."""
        return self.rescue.coefficients.applied(self._config.algorithm)

    async def _take_groups(self, step: LoopStep, rollouts: Rollouts) -> list[Group] | None:

        async def take_groups() -> list[Group] | None:
            with self._times.during("step/publish_s"):
                # Groups for this step are only released when no engine is further behind its version.
                await self._parts.publisher.settle(behind=self._config.rollout.max_head_offpolicyness)
            await self._batches.cancel_idle(rollouts)
            groups = await unless(self._state.asked, run_beside(next_groups(), self._parts.publisher.watch()))
            return self.rescue.taken or None if groups is None else groups  # they may have come while the wait for them was given up

        async def next_groups() -> list[Group]:
            self.rescue.taken = await rollouts.prepare_batch()
            self._parts.journal.record(BatchTaken(step.global_step, tuple(group.prompt_id for group in self.rescue.taken)))
            return self.rescue.taken

        with self._times.during("step/rollout_wait_s", "rollout", step=step.global_step):
            return await self._parts.peers.all_ready("rollouts", take_groups)

    async def _score(self, batch: Batch, groups: Sequence[Group], step: LoopStep) -> ScoredBatch:
        await self._parts.turns.to_ranks(self._parts.publisher)
        if not self._algorithm.needs_scores:
            return ScoredBatch(batch)
        with self._times.during("step/score_s", "score", step=step.global_step):
            return await self._training.score(batch, groups, step, self._algorithm)

    async def _train(self, batch: Batch, step: LoopStep, rollouts: Rollouts) -> dict[str, float]:
        if step.global_step < self._state.total_steps:
            self._batches.make_ahead(step.following(), rollouts, self._algorithm)
        with self._times.during("step/train_s", "train", step=step.global_step):
            self.rescue.begin_step()
            stats = await self._training.train(batch, step)
            self.rescue.end_step(step)
        return stats

    async def _publish(self, version: Version, rollouts: Rollouts | None = None) -> None:
        """Publish a version: return when it is written. When engines serve it, record the report and let `rollouts` know."""

        def served(report: PublishReport) -> None:
            self._state.highlights = self._state.highlights.reaching(logprob_gap=report.canary_gap).proving(report.proofs)
            self._steps.published(version, report)
            if rollouts is not None:
                rollouts.serve(version)

        await self._parts.publisher.publish(version, on_served=served)

    async def _record_step(
        self, step: LoopStep, groups: list[Group], scored: ScoredBatch, stats: tuple[dict[str, float], StatsPart], rollouts: Rollouts,
    ) -> _Done:
        """Bring a step that is trained into the journal with its statistics, and store its rollouts.

        `stats` are the metrics of its training, and the statistics of this process's groups.
        """
        trained, own = stats
        done = _Done(groups, scored.batch.with_columns(**scored.known), await self._measure(trained, scored, own, rollouts))
        known = finite(done.stats)
        self._parts.journal.record(computed_by(self._parts.trainers, step))
        self._parts.journal.record(StepTrained(step.global_step, state_of(step, self._state.highlights, self.rescue.coefficients, known)))
        self.rescue.unwritten, self.rescue.left = known, partial(self._steps.keep_rollouts, step, done.groups, done.batch)
        await self.rescue.left()
        self.rescue.left = None
        return done

    async def _measure(self, trained: dict[str, float], scored: ScoredBatch, own: StatsPart, rollouts: Rollouts) -> dict[str, float]:
        """Return the statistics of a step over all peers, and go on to the coefficients of the next."""
        algorithm, parts, coefficients = self._config.algorithm, self._parts, self.rescue.coefficients
        diverged = [await asyncio.to_thread(reference_stats, scored.batch)] if algorithm.kl_target else []
        of_all = await parts.peers.gather("export_stats", combine([own, rollouts.take_stats(), scored.stats, *diverged]))
        took = self._times.stage_metrics() | parts.turns.take_metrics()
        stats = trained | batch_metrics(of_all) | took | coefficients.as_metrics(algorithm)
        self.rescue.coefficients = coefficients.after(stats, algorithm)
        return stats

    # -- between steps -------------------------------------------------------------------------------------------------------------------

    async def _follow(self, step: LoopStep, done: _Done, evaluations: RunEvaluations) -> None:
        """Do all that follows a step that is recorded: decide whether it is the last, and save and evaluate what is due."""
        state = self._state
        await state.agree(self._parts.peers, overdue=self._checkpoints.overdue())
        if not state.stopping and evaluations.due(step.global_step):
            state.unevaluated = finite(done.stats)
        last = step.global_step == state.total_steps
        is_due = self._checkpoints.due(step.global_step, last=last or state.stopping or state.saving)
        if is_saved := is_due and state.unevaluated is not None:  # an evaluation may take long, or fail
            await self.rescue.save_step(step)
        await self._end_step(step, done.stats, evaluations, groups=done.groups, is_saved=is_saved, is_due=is_due)

    async def _end_step(
        self, step: LoopStep, stats: dict[str, float], evaluations: RunEvaluations, *, groups: Sequence[Group] = (), is_saved: bool,
        is_due: bool = False,
    ) -> None:
        """Run the evaluations that are due after a step, commit its row, export, and save or amend its checkpoint.

        Args:
            groups: the step's groups, to show samples of; none for a step of an earlier process.
            is_saved: whether there is a checkpoint of the step, from before its evaluation.
            is_due: whether one is due.
        """
        state, global_step = self._state, step.global_step
        state.finishing = global_step == state.total_steps
        try:
            if state.unevaluated is not None:
                stats = stats | await evaluations.run(global_step, last=state.finishing)
        finally:
            state.highlights = state.highlights.reaching(staleness=int(stats.get("rollout/staleness_max_versions", 0)))
            await self._steps.commit(step, groups, stats)  # the step itself is done
            self.rescue.unwritten = None
        state.unevaluated = None
        last = state.finishing = global_step == state.total_steps  # the evaluation may have made this step the last
        await self._parts.peers.meet("commit_stats")
        await self._checkpoints.export_step(global_step)
        if last:  # before the checkpoint says that all is done
            await self._best.export_if_best(global_step)
            await self._checkpoints.export()
        self._parts.journal.record(StepEnded(global_step, state_of(step, state.highlights, self.rescue.coefficients)))
        if is_saved:
            await self._checkpoints.amend(version=step.next_version, highlights=state.highlights)
        elif is_due or last or self._best.is_of(global_step):
            await self.rescue.save_step(step)
        if not last:
            await self._best.export_if_best(global_step)  # after the checkpoint: a resumed run never stands before its best step

    async def _stop_between_steps(self) -> None:
        """End the run where the user wants it to stop while it waits for rollouts."""
        self._state.stopping = True
        self._record.console.note(f"no step is in training, so the run ends after step {self._state.global_step}")
        await self.rescue.save_last()

    def _stand(self, saved: SavedState) -> None:
        """Stand where a checkpoint or the journal says, in steps, coefficients and data."""
        self._state.resume(saved)
        self.rescue.coefficients = Coefficients.of(self._config.algorithm, saved.coefficients)
        head = saved.heads[self._parts.head]
        self._stream.restore(head.stream)
        self._num_flat_rejected = head.num_flat_rejected
        for prompt_id in head.in_flight:
            self._stream.give_back(prompt_id)

    def _resume(self, saved: SavedState) -> None:
        """Go on in the records of the steps that are done."""
        self._record.resume_after(saved.global_step, repeats_row=saved.unevaluated is not None)
        in_flight = sum(len(each.in_flight) for each in saved.heads)
        self._record.events.record("resumed", global_step=saved.global_step, version=saved.version, prompts_in_flight=in_flight)
        self._record.console.note(f"resumed after step {saved.global_step}")

    def _result(self) -> TrainResult:
        return TrainResult(self._state.global_step, self._state.highlights, self._state.stopped_early)
