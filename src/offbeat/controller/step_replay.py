"""Trains the steps of a recorded run again, without engines, and compares what comes out with what the run has recorded.

Called by `runs.recorded_run`. The groups of each step, its coefficients and how its sequences were spread over the ranks are in the
journal; the rest follows from settings, data and the weights to begin with. So metrics and weights come out the same, bit for bit, on the
same machine with the same versions.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.algorithms.coefficients import Coefficients
from offbeat.algorithms.experience import batch_metrics, reference_stats, sft_batch
from offbeat.checkpoint.manifest import file_digests
from offbeat.controller.batches import StepBatches
from offbeat.controller.inputs import choose_canary
from offbeat.controller.live_replay import LiveReplay, LiveStep
from offbeat.controller.parts import RunParts
from offbeat.controller.state import LoopStep, SavedState
from offbeat.controller.step_training import StepTraining
from offbeat.data import wire
from offbeat.data.cost import CostModel
from offbeat.data.stream import PromptStream
from offbeat.disk import discard, sha256
from offbeat.journal.history import PastStep
from offbeat.telemetry.tracker import combine

TIMES = frozenset({"train/tokens_per_s_per_device", "train/mfu", "train/busy_share", "train/peak_memory_bytes", "balance/lost_s"})
"""Metrics of the ranks that measure time or memory."""

_COMPUTED = ("train/", "policy/", "reward/", "critic/", "balance/")
"""Beginnings of the names of metrics that a step computes from its batch and its weights."""

_TENSORS = ".distcp"
"""Suffix of the files of a checkpoint that have its tensors; the names of its other files are random."""

_WEIGHTS = "*.safetensors"
"""Files of an export that have its tensors."""

_OF_ENGINES = frozenset({"policy/canary_gap"})


@dataclass(frozen=True)
class ReplayedStep:
    """A step that was trained again.

    Attributes:
        difference: the first metric or file that came out otherwise, as a sentence; "" if all are equal.
        has_checkpoint: whether the run has a checkpoint of the step, so that the optimizer's state was compared as well.
        has_export: whether the run has exported the model after the step, so that its files were compared as well.
        live: what came of generating its answers again; None where this was not asked for.
    """

    global_step: int
    difference: str
    num_metrics: int
    has_weights: bool
    has_checkpoint: bool
    has_export: bool = False
    live: LiveStep | None = None

    @property
    def is_equal(self) -> bool:
        """Whether all that was compared is equal."""
        return not self.difference and (self.live is None or not self.live.difference)


@dataclass(frozen=True)
class RecordedFiles:
    """What a run still has of what it wrote, to compare with.

    Attributes:
        rows: its rows of metrics by step; steps without one have no metrics to compare.
        checkpoints, exports: their folders by step.
    """

    rows: Mapping[int, Mapping[str, Any]]
    checkpoints: Mapping[int, Path]
    exports: Mapping[int, Path]


@dataclass(frozen=True)
class Beginning:
    """Where a replay begins: with a checkpoint of the run, or the initial model and its warm-up.

    Attributes:
        folder, saved: the checkpoint and its state; None for the initial model.
        warm_up_steps: supervised steps before the first step, where it begins with the initial model.
    """

    folder: Path | None = None
    saved: SavedState | None = None
    warm_up_steps: int = 0


class Replay:
    """One replay; `scratch` is a folder for what it writes, which it leaves empty. With `live`, answers are generated again."""

    def __init__(self, parts: RunParts, *, scratch: Path, live: LiveReplay | None = None) -> None:
        config = self._config = parts.config
        self._parts = parts
        self._live = live
        self._scratch = scratch
        self._stream = PromptStream(parts.inputs.train, seed=config.run.seed, shuffle=config.data.shuffle)
        self._batches = StepBatches(parts, max_new_tokens=config.rollout.max_new_tokens, timeout_s=config.train.step_timeout_s)
        self._training = StepTraining(
            parts, self._stream, num_minibatches=config.algorithm.num_minibatches, critic=config.critic, seed=config.run.seed)
        self._canary = choose_canary(parts.inputs, config)

    async def run(self, beginning: Beginning, steps: Sequence[PastStep], files: RecordedFiles) -> AsyncIterator[ReplayedStep]:
        """Train these consecutive steps, and yield each.

        Raises WorkerError if a rank failed, StorageError if the journal cannot be read, DataError if it has changed meanwhile.
        """
        before = await self._begin(beginning)
        if self._live is not None and steps:
            await self._live.take_version(wire.decode_json(SavedState, steps[0].state).version - 1, step=steps[0].global_step)
        for past in steps:
            after = wire.decode_json(SavedState, past.state)
            coefficients = Coefficients.of(self._config.algorithm, before)
            step = LoopStep(past.global_step, after.version - 1, after.version)
            computed = await self._train(past, step, coefficients)
            difference, num_metrics = compare_metrics(computed, files.rows.get(past.global_step, {}))
            wanted = past.computed.fingerprint if past.computed is not None else ""
            if wanted and not difference and (found := await self._fingerprint(step)) != wanted:
                difference = f"the weights have the fingerprint {found[:12]}, and had {wanted[:12]}"
            checkpoint, export = files.checkpoints.get(past.global_step), files.exports.get(past.global_step)
            if checkpoint is not None and not difference:
                difference = await self._compare_checkpoint(checkpoint)
            if export is not None and not difference:
                difference = await self._compare_export(export)
            live = None
            if self._live is not None:
                live = self._live.of_step(past.global_step)
                await self._live.take_version(step.next_version, step=past.global_step + 1, changed=difference)
            yield ReplayedStep(past.global_step, difference, num_metrics, bool(wanted), checkpoint is not None, export is not None, live)
            before = after.coefficients

    async def _begin(self, beginning: Beginning) -> Coefficients | None:
        parts, config = self._parts, self._config
        if beginning.warm_up_steps:
            await self._warm_up(beginning.warm_up_steps)
        if parts.critic is not None:
            await parts.critic.restart_optimizer(config.critic.optimizer, total_steps=config.run.total_steps)
        await parts.trainers.restart_optimizer(config.train.optimizer, total_steps=config.run.total_steps)
        if beginning.folder is None or beginning.saved is None:
            return None
        await parts.trainers.load(beginning.folder / "ranks")
        if parts.critic is not None and (beginning.folder / "critic").exists():
            await parts.critic.load(beginning.folder / "critic")
        return beginning.saved.coefficients

    async def _warm_up(self, num_steps: int) -> None:
        """Imitate the rows of the run's warm-up; see `controller.supervised`."""
        parts, config = self._parts, self._config
        stream = PromptStream(parts.inputs.train, seed=config.run.seed + 1, shuffle=config.data.shuffle)
        await parts.trainers.restart_optimizer(config.sft.optimizer, total_steps=config.sft.total_steps)
        for _ in range(num_steps):
            await parts.trainers.train_step(sft_batch(parts.inputs.supervision.draw(stream, config.sft.batch_size)))

    async def _train(self, past: PastStep, step: LoopStep, coefficients: Coefficients) -> dict[str, float]:
        parts, algorithm = self._parts, self._config.algorithm
        groups = await asyncio.to_thread(lambda: [each.read() for each in past.groups])
        own = coefficients.applied(algorithm)
        batch, stats = await self._batches.take(groups, step, own)
        if past.computed is not None:
            parts.trainers.balance_by(CostModel(*past.computed.cost))
        scored = await self._training.score(batch, groups, step, own)
        trained = await self._training.train(scored.batch, step)
        diverged = [await asyncio.to_thread(reference_stats, scored.batch)] if algorithm.kl_target else []
        return trained | batch_metrics([combine([stats, scored.stats, *diverged])]) | coefficients.as_metrics(algorithm)

    async def _fingerprint(self, step: LoopStep) -> str:
        folder = self._scratch / f"v{step.next_version:08d}"
        written = await self._parts.trainers.write_weights(step.next_version, folder, canary=self._canary)
        discard(folder)
        return written.fingerprint

    async def _compare_checkpoint(self, checkpoint: Path) -> str:
        """Save the state of the ranks, and compare its files with those of the run's checkpoint."""
        parts, folder = self._parts, self._scratch / checkpoint.name
        await parts.trainers.save(folder / "ranks")
        if parts.critic is not None and (checkpoint / "critic").exists():
            await parts.critic.save(folder / "critic")

        digests = {name: digest for name, digest in file_digests(checkpoint).items() if name.endswith(_TENSORS)}
        difference = await asyncio.to_thread(_compare_files, digests, folder, "checkpoint, with weights and optimizer state,")
        discard(folder)
        return difference

    async def _compare_export(self, export: Path) -> str:
        """Export the model, and compare its weights with those of the run's export."""
        folder = self._scratch / export.name
        await self._parts.trainers.export(folder, tokenizer=self._parts.inputs.tokenizer_folder)
        digests = await asyncio.to_thread(lambda: {path.name: sha256(path) for path in sorted(export.glob(_WEIGHTS))})
        difference = await asyncio.to_thread(_compare_files, digests, folder, "exported model")
        discard(folder)
        return difference


def _compare_files(digests: Mapping[str, str], written: Path, what: str) -> str:
    """Compare files, recorded by their digests, with those of a folder; returns the first difference as a sentence, "" if there is none."""
    for name, digest in digests.items():
        path = written / name
        if not path.exists():
            return f"the {what} has the file {name}, and none was written now"
        if sha256(path) != digest:
            return f"{name} of the {what} has other bytes"
    return ""


def compares(name: str) -> bool:
    """Whether a metric of a step follows from its batch and weights alone, as "train/loss" does and "train/mfu" does not."""
    return name.startswith(_COMPUTED) and name not in TIMES and name not in _OF_ENGINES


def compare_metrics(computed: Mapping[str, float], row: Mapping[str, Any]) -> tuple[str, int]:
    """Compare the metrics that a step has computed now with its row.

    Returns:
        The first difference as a sentence, such as "train/loss is 0.25, and was 0.125"; "" if there is none. And the number of metrics
        that were compared: all but times, and those that engines have given.
    """
    num = 0
    for name in dict.fromkeys([*row, *computed] if row else ()):
        if not compares(name) and (name not in computed or name in TIMES):
            continue
        num += 1
        if name not in row:
            return f"{name} is {computed[name]!r}, and the run has no such metric", num
        if name not in computed:
            return f"{name} was {row[name]!r}, and is not computed now", num
        now = computed[name] if math.isfinite(computed[name]) else None
        if now != row[name]:
            return f"{name} is {computed[name]!r}, and was {row[name]!r}", num
    return "", num
