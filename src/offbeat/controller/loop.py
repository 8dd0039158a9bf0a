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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from offbeat.aio import run_beside, unless
from offbeat.algorithms.coefficients import Coefficients
from offbeat.algorithms.critic import critic_batch
from offbeat.algorithms.experience import batch_metrics, reference_stats
from offbeat.controller.batches import StepBatches
from offbeat.controller.checkpoints import RunCheckpoints
from offbeat.controller.diagnosis import LATE_S, slow_first_step
from offbeat.controller.evaluate import Evaluator, check_known, make_evaluators
from offbeat.controller.parts import Rollouts, RunParts
from offbeat.controller.scoring import score_batch
from offbeat.controller.state import HeadState, Highlights, LoopStep, RunState, SavedState
from offbeat.controller.step_record import StepRecord
from offbeat.controller.step_times import StepTimes
from offbeat.data.batch import Batch
from offbeat.data.stream import PromptStream
from offbeat.data.trajectory import Group
from offbeat.errors import OffbeatError
from offbeat.evaluation.files import encode_lines
from offbeat.evaluation.samples import EvaluatedSet
from offbeat.evaluation.scores import Evaluation
from offbeat.fleet.publication import PublishReport
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
    training = _Training(parts, state, begun)
    try:
        return await run_beside(training.run(), parts.watch())
    except Exception as exc:
        if parts.peers.have_heard(exc):
            await training.rescue()
        raise


class _Training:
    """One run's parts, bound together."""

    def __init__(self, parts: RunParts, state: RunState, begun: Highlights) -> None:
        self._parts = parts
        self._state = state
        self._config = parts.config
        self._record = parts.record
        self._batches = StepBatches(parts, max_new_tokens=parts.config.rollout.max_new_tokens, timeout_s=parts.config.train.step_timeout_s)
        self._checkpoints = RunCheckpoints(parts, parts.config.checkpoint)
        self._stream = PromptStream(
            parts.inputs.train, seed=parts.config.run.seed, shuffle=parts.config.data.shuffle, curriculum=parts.config.curriculum)
        self._num_flat_rejected = 0
        self._highlights = begun
        self._coefficients = Coefficients.of(parts.config.algorithm)
        self._steps = StepRecord(parts, self._stream, warm_up_steps=begun.warm_up_steps)
        self._whole: LoopStep | None = None
        """The step whose weights the ranks have; None while a step trains."""
        self._taken: list[Group] = []
        """Groups taken for a step that has not been trained yet."""
        self._rollouts: Rollouts | None = None
        self._unevaluated: dict[str, float | None] | None = None
        """Statistics of a step that is done but neither evaluated nor committed as a row, such as {"train/loss": 0.02}."""

    async def run(self) -> TrainResult:
        parts, state, config = self._parts, self._state, self._config
        if parts.critic is not None:
            await parts.critic.restart_optimizer(config.critic.optimizer, total_steps=config.run.total_steps)
        await parts.trainers.restart_optimizer(config.train.optimizer, total_steps=config.run.total_steps)
        saved = await self._checkpoints.restore()
        if saved is not None:
            self._resume(saved)
            if self._is_best(saved.global_step):
                await self._checkpoints.export_best()  # it may have ended between its checkpoint and this
        await state.agree(parts.peers)
        if state.stopping:
            return TrainResult(state.global_step, self._highlights, state.stopped_early)
        with phase("publishing the initial weights"):
            await self._publish(state.version)
            await parts.publisher.settle()  # rollouts begin with it
        rollouts = parts.source.rollouts(
            self._stream, version=state.version, last_version=state.last_version, num_flat_rejected=self._num_flat_rejected)
        self._rollouts = rollouts
        evaluators = make_evaluators(
            rollouts, parts.source, parts.inputs, config, parts.peers, log_dir=self._record.log_dir)
        self._record.console.start(f"{config.run.name} · {config.algorithm.preset}", config.run.total_steps)
        if saved is None and (before := await self._evaluate(evaluators, 0, last=True)):
            self._record.stats.commit(0, 0, 0, before)
            self._steps.advise(before)
        async with rollouts, self._batches, self._timing_first_step() as timer:
            if saved is not None and saved.unevaluated is not None:
                stats = {name: math.nan if value is None else value for name, value in saved.unevaluated.items()}
                await self._end_step(state.last_step, stats, rollouts, evaluators, is_saved=True)
            for step in state.steps():
                done = await self._step(step, rollouts)
                timer.cancel()
                if done is None:
                    await self._stop_between_steps(rollouts)
                    break
                groups, batch, stats = done
                await state.agree(parts.peers, overdue=self._checkpoints.overdue)
                await self._steps.keep_rollouts(step, groups, batch)
                last = step.global_step == state.total_steps
                if not state.stopping and any(each.due(step.global_step, last=last) for each in evaluators):
                    self._unevaluated = {name: value if math.isfinite(value) else None for name, value in stats.items()}
                is_due = self._checkpoints.due(step.global_step, last=last or state.stopping or state.saving)
                if is_saved := is_due and self._unevaluated is not None:  # an evaluation may take long, or fail
                    await self._save(step, rollouts)
                await self._end_step(step, stats, rollouts, evaluators, groups=groups, is_saved=is_saved, is_due=is_due)
        if 0 < state.global_step < state.total_steps:
            await self._export(is_best=False)
        if self._highlights.heldout_fell:
            self._record.events.record("advice", text=HELDOUT_FELL)  # which the console shows with the result
        await self._record.stored()
        return TrainResult(state.global_step, self._highlights, state.stopped_early)

    async def _end_step(
        self, step: LoopStep, stats: dict[str, float], rollouts: Rollouts, evaluators: Sequence[Evaluator], *, groups: Sequence[Group] = (),
        is_saved: bool, is_due: bool = False,
    ) -> None:
        """Run the evaluations that are due after a step, commit its row, export, and save or amend its checkpoint.

        Args:
            groups: the step's groups, to show samples of; none for a step of an earlier process.
            is_saved: whether there is a checkpoint of the step, from before its evaluation.
            is_due: whether one is due.
        """
        try:
            if self._unevaluated is not None:
                stats = stats | await self._evaluate(evaluators, step.global_step, last=step.global_step == self._state.total_steps)
        finally:
            staleness = int(stats.get("rollout/staleness_max_versions", 0))
            self._highlights = replace(self._highlights, max_staleness=max(self._highlights.max_staleness, staleness))
            await self._steps.commit(step, groups, stats)  # the step itself is done
        self._unevaluated = None
        is_best, last = self._is_best(step.global_step), step.global_step == self._state.total_steps
        await self._parts.peers.meet("commit_stats")
        await self._checkpoints.export_step(step.global_step)
        if last:
            await self._export(is_best=is_best)  # before the checkpoint says that all is done
        if is_saved:
            await self._checkpoints.amend(version=step.next_version, highlights=self._highlights)
        elif is_due or last or is_best:
            await self._save(step, rollouts)
        if is_best and not last:
            await self._checkpoints.export_best()  # after the checkpoint: a resumed run never stands before its best step

    async def _step(self, step: LoopStep, rollouts: Rollouts) -> tuple[list[Group], Batch, dict[str, float]] | None:
        """Do one step, from rollouts to published weights. None if the user wants the run to stop before there are groups to train on."""
        config, times = self._config, StepTimes(self._record.tracer)
        algorithm = self._coefficients.applied(config.algorithm)

        async def take_groups() -> list[Group] | None:
            with times.stage("step/publish_s"):
                # Groups for this step are only released when no engine is further behind its version.
                await self._parts.publisher.settle(behind=config.rollout.max_head_offpolicyness)
            await self._batches.settle(rollouts)
            groups = await unless(self._state.asked, run_beside(take(), self._parts.publisher.watch()))
            return self._taken or None if groups is None else groups  # they may have come while the wait for them was given up

        async def take() -> list[Group]:
            self._taken = await rollouts.prepare_batch()
            return self._taken

        with times.stage("step/rollout_wait_s", "rollout", step=step.global_step):
            if (groups := await self._parts.peers.all_ready("rollouts", take_groups)) is None:
                return None
        with times.stage("step/train_s", "advantage"):
            batch, own = await self._batches.take(groups, step, algorithm)
        await self._parts.turns.to_ranks(self._parts.publisher)
        scored, known = StatsPart(), {}
        if algorithm.needs_scores:
            with times.stage("step/score_s", "score", step=step.global_step):
                batch, scored, known = await score_batch(
                    batch, self._parts, algorithm, seed=config.run.seed + step.global_step,
                    row_of=lambda group: self._stream.row(groups[group].prompt_id))
        if step.global_step < self._state.total_steps:
            self._batches.make_ahead(step.following(), rollouts, algorithm)
        with times.stage("step/train_s", "train", step=step.global_step):
            self._whole = None
            stats = await self._train(batch, step)
            self._whole, self._taken = step, []
        with times.stage("step/publish_s", "publish", version=step.next_version):
            rollouts.advance(step.next_version)
            await self._publish(step.next_version, rollouts.serve)
        diverged = [await asyncio.to_thread(reference_stats, batch)] if algorithm.kl_target else []
        part = combine([own, rollouts.take_stats(), scored, *diverged])
        parts = await self._parts.peers.gather("export_stats", part)
        stats |= batch_metrics(parts) | times.metrics() | self._parts.turns.take_metrics() | self._coefficients.metrics(config.algorithm)
        self._coefficients = self._coefficients.after(stats, config.algorithm)
        return groups, batch.with_columns(**known), stats

    @asynccontextmanager
    async def _timing_first_step(self) -> AsyncIterator[asyncio.TimerHandle]:
        """Show advice on shorter steps, unless the timer is cancelled before."""

        def tell() -> None:
            if sentence := slow_first_step(self._config):
                self._record.note("advice", sentence)

        timer = asyncio.get_running_loop().call_later(LATE_S, tell)
        try:
            yield timer
        finally:
            timer.cancel()

    async def _train(self, batch: Batch, step: LoopStep) -> dict[str, float]:
        """Train the critic, if there is one, and after its warm-up the policy."""
        config, critic, stats = self._config, self._parts.critic, {}
        if critic is not None:
            learnt = await asyncio.to_thread(critic_batch, batch, value_clip=config.critic.value_clip)
            found = await critic.train_step(learnt, num_minibatches=config.algorithm.num_minibatches)
            stats = {name.replace("train/", "critic/"): value for name, value in found.items()}
            if step.global_step <= config.critic.warmup_steps:
                return {"train/tokens": stats.pop("critic/tokens"), **stats}
            del stats["critic/tokens"]
        return stats | await self._parts.trainers.train_step(batch, num_minibatches=config.algorithm.num_minibatches)

    async def _publish(self, version: Version, on_serving: Callable[[Version], None] = lambda _version: None) -> None:
        """Publish a version: return when it is written. When engines serve it, record the report and call `on_serving`."""

        def served(report: PublishReport) -> None:
            self._highlights = replace(self._highlights, max_logprob_gap=max(self._highlights.max_logprob_gap, report.canary_gap))
            self._steps.published(version, report)
            on_serving(version)

        await self._parts.publisher.publish(version, on_served=served)

    async def _evaluate(self, evaluators: Sequence[Evaluator], global_step: int, *, last: bool) -> dict[str, float]:
        """Evaluate the sets that are due after a step, one after the other; returns metrics such as {"eval/accuracy": 0.41}."""
        stats: dict[str, float] = {}
        times = StepTimes(self._record.tracer)
        for evaluator in evaluators:
            if evaluator.due(global_step, last=last):
                await self._parts.publisher.settle()
                with times.stage("step/evaluate_s", "evaluate"):
                    evaluation = await evaluator.run(keep=partial(self._keep, global_step) if self._config.evaluate.keep_samples else None)
                self._note_evaluation(evaluation, global_step)
                stats |= evaluation.metrics()
        best = self._highlights.best
        if best is not None and best.is_final(self._config.evaluate) and not last:
            self._record.note("no_gain", f"{best.metric} has not risen above {best.value:.3f}, of step {best.global_step}, in"
                              f" {best.num_since} evaluations, so step {global_step} is the last")
            self._state.total_steps = global_step
        return stats | {"step/evaluate_s": times.total_s} if stats else {}

    def _note_evaluation(self, evaluation: Evaluation, global_step: int) -> None:
        """Record and show an evaluation of one set, and count it among the highlights."""
        self._record.events.record("evaluation", global_step=global_step, **evaluation.metrics())
        prompts = f"{evaluation.num_prompts} prompts"
        told = f"{evaluation.title} {evaluation.accuracy:.3f} after step {global_step} ({prompts})"
        self._record.console.note(f"{told}{evaluation.shares_text}")
        self._highlights = self._highlights.evaluated(
            evaluation.name, evaluation.accuracy, num_prompts=evaluation.num_prompts, global_step=global_step)
        check_known(evaluation, self._config.evaluate.keep_best)
        if (value := evaluation.metrics().get(self._config.evaluate.keep_best)) is not None:
            self._highlights = self._highlights.measured(self._config.evaluate.keep_best, value, global_step=global_step)
        if evaluation.own_failure:
            self._record.note("metric_failed", f"{evaluation.title}: evaluate.metric failed: {evaluation.own_failure}")

    async def _keep(self, global_step: int, played: EvaluatedSet) -> None:
        await self._record.evaluation(global_step, played.name, encode_lines(played))

    def _is_best(self, global_step: int) -> bool:
        """Whether the model after this step is the best one so far; the initial model is not exported."""
        best = self._highlights.best
        return best is not None and best.metric == self._config.evaluate.keep_best and best.global_step == global_step > 0

    async def _export(self, *, is_best: bool) -> None:
        if is_best:
            await self._checkpoints.export_best()
        await self._checkpoints.export()

    async def _stop_between_steps(self, rollouts: Rollouts) -> None:
        """End the run where the user wants it to stop while it waits for rollouts."""
        self._state.stopping = True
        self._record.console.note(f"no step is in training, so the run ends after step {self._state.global_step}")
        if step := await self._unsaved():
            await self._save(step, rollouts)

    async def rescue(self) -> None:
        """Save the last step that was done, after any error has ended the run, if the ranks still can.

        Prompts that have failed too often since do not return in this epoch.
        """
        if self._rollouts is None or (step := await self._unsaved()) is None:
            return
        try:
            if step.global_step == self._state.total_steps:
                await self._export(is_best=False)
            await self._save(step, self._rollouts, unproven=True)
        except (OffbeatError, OSError) as exc:
            self._record.note("not_saved", f"no checkpoint of step {step.global_step} could be saved: {exc}")
        else:
            self._record.console.note(f"the run ends after step {step.global_step}, of which a checkpoint is saved")

    async def _unsaved(self) -> LoopStep | None:
        """Return the last step that was done, if the ranks have its weights and no checkpoint is of it."""
        step = self._whole

        async def is_unsaved() -> bool:
            return step is not None and not self._checkpoints.has(step.global_step)

        return step if await self._parts.peers.lead("unsaved", is_unsaved, bool) else None

    async def _save(self, step: LoopStep, rollouts: Rollouts, *, unproven: bool = False) -> None:
        """Save a checkpoint of a step; `unproven` does not wait for engines to serve its version."""
        await self._record.stored()  # a resumed run does not write this step's rollouts again
        with self._record.tracer.span("checkpoint", "controller"):
            in_flight = (*(group.prompt_id for group in self._taken), *rollouts.in_flight)
            head = HeadState(self._stream.state(), in_flight, rollouts.num_flat_rejected)
            await self._checkpoints.save(
                step.global_step, version=step.next_version, head=head, highlights=self._highlights, coefficients=self._coefficients,
                unevaluated=self._unevaluated, unproven=unproven)
        self._record.events.record("checkpoint", global_step=step.global_step)

    def _resume(self, saved: SavedState) -> None:
        self._state.global_step, self._state.version = saved.global_step, saved.version
        self._highlights = saved.highlights
        self._coefficients = Coefficients.of(self._config.algorithm, saved.coefficients)
        head = saved.heads[self._parts.head]
        self._stream.restore(head.stream)
        self._num_flat_rejected = head.num_flat_rejected
        for prompt_id in head.in_flight:
            self._stream.give_back(prompt_id)
        self._unevaluated = saved.unevaluated
        self._record.resume_after(saved.global_step, repeats_row=saved.unevaluated is not None)
        in_flight = sum(len(each.in_flight) for each in saved.heads)
        self._record.events.record("resumed", global_step=saved.global_step, version=saved.version, prompts_in_flight=in_flight)
        self._record.console.note(f"resumed after step {saved.global_step}")
