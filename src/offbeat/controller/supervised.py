"""Supervised fine-tuning on the same ranks, with the same evaluation: `offbeat sft`, and the warm-up of `offbeat train`.

It saves and resumes as reinforcement learning does, under names of its own: a run that is started again goes on with the very losses that
it would have had.
"""

import time
from dataclasses import dataclass

from offbeat.aio import run_beside
from offbeat.config.train import SftConfig
from offbeat.controller.checkpoints import FINE_TUNING, WARM_UP, Checkpoints
from offbeat.controller.evaluate import Evaluation, Evaluator
from offbeat.controller.parts import RunParts
from offbeat.controller.state import HeadState, Highlights, RunState, SavedState
from offbeat.data.dataset import PromptStream

_RECORDED = ("train/loss", "train/grad_norm", "step/total_s")


@dataclass(frozen=True)
class SftResult:
    """What supervised fine-tuning came to.

    Attributes:
        steps: optimizer steps done, over all resumptions.
        trained_tokens: that the loss was taken of, over all resumptions.
        final_loss: of the last step, the mean over its tokens; None if there was nothing left to do.
        accuracy: held-out accuracy at the last evaluation; None without one.
        stopped_early: the user asked to stop; the same command goes on.
    """

    steps: int
    trained_tokens: int
    final_loss: float | None
    accuracy: float | None
    stopped_early: bool


def is_finished(config: SftConfig, *, steps: int, accuracy: float | None) -> bool:
    """Whether nothing is left to do after so many steps with this held-out accuracy."""
    return steps >= config.total_steps or (accuracy is not None and accuracy >= config.stop_at_accuracy)


async def fine_tune(parts: RunParts, state: RunState, *, standalone: bool) -> SftResult:
    """Imitate the dataset's answers until `sft.total_steps`, or until held-out accuracy reaches `sft.stop_at_accuracy`.

    Evaluations publish the weights first, so `state.version` rises with each. A `standalone` run keeps its metrics and exports the model;
    a warm-up leaves both to the reinforcement learning that follows.
    """
    return await run_beside(_FineTuning(parts, state, standalone=standalone).run(), parts.watch())


class _FineTuning:
    """One fine-tuning's parts, bound together."""

    def __init__(self, parts: RunParts, state: RunState, *, standalone: bool) -> None:
        config = parts.config
        self._parts = parts
        self._state = state
        self._sft = config.sft
        self._record = parts.record
        self._standalone = standalone
        self._checkpoints = Checkpoints(parts, FINE_TUNING if standalone else WARM_UP)
        self._stream = PromptStream(parts.inputs.train, seed=config.run.seed + 1, shuffle=config.data.shuffle)
        self._step = 0
        self._trained_tokens = 0
        self._loss: float | None = None
        self._accuracy: float | None = None

    async def run(self) -> SftResult:
        parts, state, sft = self._parts, self._state, self._sft
        await parts.trainers.restart_optimizer(sft.optimizer, total_steps=sft.total_steps)
        saved = await self._checkpoints.restore()
        if saved is not None:
            self._resume(saved)
        rollouts = parts.source.rollouts(self._stream, version=state.version, last_version=state.version)
        evaluator = Evaluator(rollouts, parts.inputs.heldout, parts.config.timed_evaluate, parts.peers)
        self._record.console.start(f"{parts.config.run.name} · supervised", sft.total_steps)
        if parts.inputs.num_dropped:
            self._record.console.note(f'{parts.inputs.num_dropped} rows are too long and dropped, as sft.too_long = "drop" says')
        await state.agree(parts.peers)
        while not (self._finished or state.stopping):
            await self._train(evaluator)
            if self._finished and self._standalone:
                await self._checkpoints.export()  # before the last checkpoint, which says that all is done
            if self._checkpoints.due(self._step, last=self._finished or state.stopping):
                await self._save()
        if self._standalone and not self._finished:
            await self._checkpoints.export()
        return SftResult(
            self._step, self._trained_tokens, self._loss, self._accuracy, stopped_early=state.stopping and not self._finished)

    @property
    def _finished(self) -> bool:
        return is_finished(self._sft, steps=self._step, accuracy=self._accuracy)

    async def _train(self, evaluator: Evaluator) -> None:
        """One step, with its evaluation and export if they are due."""
        parts, sft, start = self._parts, self._sft, time.monotonic()
        self._step += 1
        with self._record.tracer.span("train", "controller", step=self._step):
            stats = await parts.trainers.train_step(parts.source.sft_batch(self._stream, sft.batch_size))
        self._trained_tokens += int(stats["train/tokens"])
        self._loss = stats["train/loss"]
        await self._state.agree(parts.peers)
        last = self._step == sft.total_steps
        if (last or (sft.evaluate_every_steps and self._step % sft.evaluate_every_steps == 0)) and not self._state.stopping:
            evaluation = await self._evaluate(evaluator)
            if evaluation is not None:
                self._accuracy = evaluation.accuracy
                stats |= evaluation.metrics()
                self._record.console.note(f"held-out accuracy {evaluation.accuracy:.3f} after {self._step} supervised steps")
        stats["step/total_s"] = time.monotonic() - start
        self._record.console.update(self._step, stats)
        if self._standalone:
            self._record.stats.commit(self._stream.state().epoch, self._step, self._step, stats)
        self._record.events.record("sft_step", step=self._step, **{name: stats[name] for name in _RECORDED})
        await parts.peers.meet("commit_stats")
        if self._standalone:
            await self._checkpoints.export_step(self._step)

    async def _evaluate(self, evaluator: Evaluator) -> Evaluation | None:
        if not evaluator.due(0, last=True):
            return None
        self._state.version += 1
        with self._record.tracer.span("publish", "controller", version=self._state.version):
            await self._parts.publisher.publish(self._state.version, on_served=lambda _report: None)
            await self._parts.publisher.settle()
        with self._record.tracer.span("evaluate", "controller"):
            return await evaluator.run()

    async def _save(self) -> None:
        with self._record.tracer.span("checkpoint", "controller"):
            await self._checkpoints.save(
                self._step, version=self._state.version, head=HeadState(self._stream.state(), ()),
                highlights=Highlights(heldout_after=self._accuracy, trained_tokens=self._trained_tokens))
        self._record.events.record("sft_checkpoint", step=self._step)

    def _resume(self, saved: SavedState) -> None:
        self._step, self._state.version = saved.global_step, saved.version
        self._accuracy, self._trained_tokens = saved.highlights.heldout_after, saved.highlights.trained_tokens
        self._stream.restore(saved.heads[self._parts.head].stream)
        # The rows after a warm-up are of reinforcement learning that left no checkpoint, and begins again.
        self._record.resume_after(saved.global_step if self._standalone else -1)
        self._record.events.record("sft_resumed", step=saved.global_step, version=saved.version)
        self._record.console.note(f"resumed after {saved.global_step} supervised steps")
