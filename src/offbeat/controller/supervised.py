"""The loop of all training on rows with known answers: `offbeat sft`, the warm-up of `offbeat train`, and every other `Lesson`.

A lesson defines one kind of training: its reader of rows, how they become batches, its evaluation and its export. The loop does the rest:
steps, metrics, events, checkpoints. It saves and resumes as reinforcement learning does, under names of its own: a run that is started
again goes on with the very losses that it would have had.
"""

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from offbeat.aio import run_beside
from offbeat.config.root import TRAINING_KINDS, Config
from offbeat.config.train import OptimizerConfig
from offbeat.config.training_kinds import TrainingKind
from offbeat.controller.checkpoints import WARM_UP, ModelExporter, RunCheckpoints
from offbeat.controller.evaluate import Evaluator
from offbeat.controller.inputs import RunInputs, read_inputs
from offbeat.controller.parts import RunParts
from offbeat.controller.state import HeadState, Highlights, RunState, SavedState
from offbeat.data.batch import Batch
from offbeat.data.dataset import Dataset
from offbeat.data.stream import PromptStream
from offbeat.errors import OffbeatError
from offbeat.loading import load_module

_RECORDED = ("train/loss", "train/grad_norm", "step/total_s", "eval/accuracy")


class LessonConfig(Protocol):
    """Settings that the section of every lesson has."""

    @property
    def total_steps(self) -> int: ...

    @property
    def optimizer(self) -> OptimizerConfig: ...

    @property
    def evaluate_every_steps(self) -> int: ...


class EvaluationOutcome(Protocol):
    """Result of an evaluation."""

    @property
    def accuracy(self) -> float: ...

    def metrics(self) -> dict[str, float]: ...


class Lesson(ABC):
    """One kind of supervised training. In SPMD mode every rank has one, and calls the same methods in the same order.

    Attributes:
        kind: its row in the table of kinds.
        standalone: whether the run keeps its metrics and exports the model; a warm-up leaves both to reinforcement learning.
    """

    kind: ClassVar[TrainingKind]
    standalone: bool = True
    config: LessonConfig
    dataset: Dataset[Any]

    def __init__(self, parts: RunParts, state: RunState) -> None:
        self._parts = parts
        self._state = state
        self.config = getattr(parts.config, self.kind.section)

    @classmethod
    @abstractmethod
    def read(cls, config: Config) -> RunInputs:
        """Read model configuration, tokenizer and rows; writes nothing. Raises errors as `controller.inputs.read_inputs`."""

    @classmethod
    def completed(cls, config: Config, *, steps: int, accuracy: float | None) -> str | None:  # noqa: ARG003
        """Say that nothing is left to do after so many steps with this held-out accuracy, and how to continue; None if something is.

        By default accuracy does not matter.
        """
        section = cls.kind.section
        if steps < getattr(config, section).total_steps:
            return None
        return f"is already complete ({steps} {cls.kind.word} steps); raise {section}.total_steps to continue"

    async def prepare(self) -> None:  # noqa: B027
        """Compute with the initial weights, on every start: the checkpoint is restored afterwards. By default nothing."""

    def set_stream(self, stream: PromptStream[Any]) -> None:  # noqa: B027
        """Take the stream of rows, at the row from which the run goes on. By default nothing."""

    @abstractmethod
    async def batch(self, stream: PromptStream[Any]) -> Batch:
        """Draw the rows of a step; the batch has no sequences on a rank that draws nothing."""

    @abstractmethod
    async def evaluate(self) -> EvaluationOutcome | None:
        """Evaluate on held-out rows; None if there are none."""

    async def export(self, folder: Path) -> None:
        """Write the model for other programs to `folder`. By default a Hugging Face folder of the language model."""
        await ModelExporter(self._parts).export(folder)


def lesson_of(kind: TrainingKind) -> type[Lesson]:
    """Return the lesson of a kind of training that is not reinforcement learning."""
    module, _, name = kind.lesson.partition(":")
    return getattr(load_module(f"offbeat.controller.{module}"), name)


@dataclass(frozen=True)
class SftResult:
    """Result of supervised training.

    Attributes:
        steps: optimizer steps done, over all resumptions.
        trained_tokens: tokens with a loss, over all resumptions.
        final_loss: mean loss over the tokens of the last step; None if there was nothing left to do.
        accuracy: held-out accuracy at the last evaluation; None without one.
        accuracy_step: steps done at that evaluation.
        stopped_early: the user asked to stop; the same command goes on.
    """

    steps: int
    trained_tokens: int
    final_loss: float | None
    accuracy: float | None
    accuracy_step: int | None
    stopped_early: bool


async def teach(parts: RunParts, state: RunState, lesson: Lesson) -> SftResult:
    """Train until the lesson is finished or the user asks to stop."""
    teaching = _Teaching(parts, state, lesson)
    try:
        return await run_beside(teaching.run(), parts.watch())
    except Exception as exc:
        if parts.peers.have_heard(exc):
            await teaching.rescue()
        raise


class Imitation(Lesson):
    """Supervised fine-tuning: the answers are imitated, and held-out prompts are answered through the engines.

    Evaluations publish the weights first, so the state's `version` rises with each. It ends after `sft.total_steps`, or when held-out
    accuracy reaches `sft.stop_at_accuracy`. A warm-up is one that is not `standalone`.
    """

    kind = TRAINING_KINDS["sft"]

    def __init__(self, parts: RunParts, state: RunState, *, standalone: bool = True) -> None:
        super().__init__(parts, state)
        self.standalone = standalone
        self.dataset = parts.inputs.train
        self._evaluator: Evaluator | None = None

    def set_stream(self, stream: PromptStream[Any]) -> None:
        parts, version = self._parts, self._state.version
        rollouts = parts.source.rollouts(stream, version=version, last_version=version)
        self._evaluator = Evaluator(
            rollouts, parts.inputs.heldout, parts.config.timed_evaluate, parts.peers, tokenizer=parts.inputs.tokenizer)

    async def batch(self, stream: PromptStream[Any]) -> Batch:
        return self._parts.source.sft_batch(stream, self._parts.config.sft.batch_size)

    async def evaluate(self) -> EvaluationOutcome | None:
        parts, state, evaluator = self._parts, self._state, self._evaluator
        assert evaluator is not None, "the lesson has begun"
        if not evaluator.due(0, last=True):
            return None
        state.version += 1
        with parts.record.tracer.span("publish", "controller", version=state.version):
            await parts.publisher.publish(state.version, on_served=lambda _report: None)
            await parts.publisher.settle()
        with parts.record.tracer.span("evaluate", "controller"):
            return await evaluator.run()

    @classmethod
    def read(cls, config: Config) -> RunInputs:
        return read_inputs(config, supervised=True)

    @classmethod
    def completed(cls, config: Config, *, steps: int, accuracy: float | None) -> str | None:
        enough = config.sft.stop_at_accuracy
        if steps >= config.sft.total_steps or accuracy is None or accuracy < enough:
            return super().completed(config, steps=steps, accuracy=accuracy)
        return (
            f"reached a held-out accuracy of {accuracy:.3f} after {steps} supervised steps; set sft.stop_at_accuracy = {enough:g} above"
            " that to continue")


class _Teaching:
    """The parts of one run, bound together."""

    def __init__(self, parts: RunParts, state: RunState, lesson: Lesson) -> None:
        config = parts.config
        self._parts = parts
        self._state = state
        self._lesson = lesson
        self._record = parts.record
        kind = lesson.kind.checkpoints if lesson.standalone else WARM_UP
        self._checkpoints = RunCheckpoints(parts, parts.config.checkpoint, kind=kind, exporter=lesson)
        self._stream = PromptStream(lesson.dataset, seed=config.run.seed + 1, shuffle=config.data.shuffle)
        self._step = 0
        self._trained_tokens = 0
        self._loss: float | None = None
        self._accuracy: float | None = None
        self._accuracy_step: int | None = None
        self._unevaluated: dict[str, float | None] | None = None
        """Statistics of a step that is done but neither evaluated nor committed as a row."""
        self._is_whole = False
        """Whether the ranks have the weights of a step that was trained in this process; False while a step trains."""

    async def run(self) -> SftResult:
        parts, state, lesson = self._parts, self._state, self._lesson
        await parts.trainers.restart_optimizer(lesson.config.optimizer, total_steps=lesson.config.total_steps)
        await lesson.prepare()
        saved = await self._checkpoints.restore()
        if saved is not None:
            self._resume(saved)
        lesson.set_stream(self._stream)
        self._record.console.start(f"{parts.config.run.name} · {lesson.kind.word}", lesson.config.total_steps)
        if parts.inputs.num_dropped:
            self._record.console.note(f'{parts.inputs.num_dropped} rows are too long and dropped, as sft.too_long = "drop" says')
        await state.agree(parts.peers)
        if saved is not None and saved.unevaluated is not None:
            await self._end_step({name: math.nan if value is None else value for name, value in saved.unevaluated.items()}, is_saved=True)
        while not (self._finished or state.stopping):
            await self._train()
        if lesson.standalone and not self._finished:
            await self._checkpoints.export()
        return SftResult(
            self._step, self._trained_tokens, self._loss, self._accuracy, self._accuracy_step,
            stopped_early=state.stopping and not self._finished)

    @property
    def _finished(self) -> bool:
        return self._lesson.completed(self._parts.config, steps=self._step, accuracy=self._accuracy) is not None

    async def _train(self) -> None:
        """One step, with its evaluation, checkpoint and export if they are due."""
        parts, lesson, start = self._parts, self._lesson, time.monotonic()
        self._is_whole = False
        self._step += 1
        await parts.turns.to_ranks(parts.publisher)
        with self._record.tracer.span("train", "controller", step=self._step):
            stats = await parts.trainers.train_step(await lesson.batch(self._stream))
        self._trained_tokens += int(stats["train/tokens"])
        self._loss, self._is_whole = stats["train/loss"], True
        stats["step/total_s"] = time.monotonic() - start
        await self._state.agree(parts.peers, overdue=self._checkpoints.overdue())
        last, every = self._step == lesson.config.total_steps, lesson.config.evaluate_every_steps
        if (last or (every and self._step % every == 0)) and not self._state.stopping:
            self._unevaluated = {name: value if math.isfinite(value) else None for name, value in stats.items()}
        is_due = self._checkpoints.due(self._step, last=last or self._state.stopping or self._state.saving)
        if is_saved := is_due and self._unevaluated is not None:  # an evaluation may take long, or fail
            await self._save()
        await self._end_step(stats, is_saved=is_saved, is_due=is_due)

    async def _end_step(self, stats: dict[str, float], *, is_saved: bool, is_due: bool = False) -> None:
        """Evaluate a step if that is due, commit its row, export, and save or amend its checkpoint.

        `is_saved` says whether there is a checkpoint of the step, from before its evaluation, and `is_due` whether one is due.
        """
        parts, lesson, start = self._parts, self._lesson, time.monotonic()
        self._state.finishing = lesson.standalone and self._step == lesson.config.total_steps
        if self._unevaluated is not None and (outcome := await lesson.evaluate()) is not None:
            self._accuracy, self._accuracy_step = outcome.accuracy, self._step
            stats = stats | outcome.metrics() | {"step/total_s": stats["step/total_s"] + time.monotonic() - start}
            self._record.console.note(f"held-out accuracy {outcome.accuracy:.3f} after {self._step} {lesson.kind.word} steps")
        self._unevaluated = None
        self._record.console.update(self._step, stats)
        if lesson.standalone:
            self._record.stats.commit(self._stream.state().epoch, self._step, self._step, stats)
        self._record.events.record(lesson.kind.event("step"), step=self._step, **{name: stats[name] for name in _RECORDED if name in stats})
        await parts.peers.meet("commit_stats")
        if lesson.standalone:
            await self._checkpoints.export_step(self._step)
            if self._finished:
                await self._checkpoints.export()  # before the checkpoint says that all is done
        if is_saved:
            await self._checkpoints.amend(version=self._state.version, highlights=self._highlights)
        elif is_due or self._finished:
            await self._save()

    async def rescue(self) -> None:
        """Save the last step that was done, after any error has ended the run, if the ranks still can."""
        parts = self._parts

        async def is_unsaved() -> bool:
            return self._is_whole and not self._checkpoints.has(self._step)

        if not await parts.peers.lead("unsaved", is_unsaved, bool):
            return
        try:
            await self._save(unproven=True)
        except (OffbeatError, OSError) as exc:
            self._record.note("not_saved", f"no checkpoint of step {self._step} could be saved: {exc}")
        else:
            self._record.console.note(f"the run ends after step {self._step}, of which a checkpoint is saved")

    @property
    def _highlights(self) -> Highlights:
        return Highlights(heldout_after=self._accuracy, heldout_after_step=self._accuracy_step, trained_tokens=self._trained_tokens)

    async def _save(self, *, unproven: bool = False) -> None:
        with self._record.tracer.span("checkpoint", "controller"):
            await self._checkpoints.save(
                self._step, version=self._state.version, head=HeadState(self._stream.state(), ()), highlights=self._highlights,
                unevaluated=self._unevaluated, unproven=unproven)
        self._record.events.record(self._lesson.kind.event("checkpoint"), step=self._step)

    def _resume(self, saved: SavedState) -> None:
        lesson = self._lesson
        self._step, self._state.version = saved.global_step, saved.version
        marks = saved.highlights
        self._accuracy, self._accuracy_step, self._trained_tokens = marks.heldout_after, marks.heldout_after_step, marks.trained_tokens
        self._stream.restore(saved.heads[self._parts.head].stream)
        self._unevaluated = saved.unevaluated
        if lesson.standalone:  # rows after a warm-up come from reinforcement learning
            self._record.resume_after(saved.global_step, repeats_row=saved.unevaluated is not None)
        self._record.events.record(lesson.kind.event("resumed"), step=saved.global_step, version=saved.version)
        self._record.console.note(f"resumed after {saved.global_step} {lesson.kind.word} steps")
