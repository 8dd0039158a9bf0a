"""When to save, and the checkpoint from which a run continues. In SPMD mode every rank calls it; the leader's view of the disk counts."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from offbeat.algorithms.coefficients import Coefficients
from offbeat.checkpoint.manifest import is_sealed
from offbeat.checkpoint.recover import CheckpointIndex, Damage, none_sound
from offbeat.config.base import Part
from offbeat.config.checkpoint import CheckpointConfig
from offbeat.config.root import TRAINING_KINDS
from offbeat.controller.inputs import write_tokenizer
from offbeat.controller.parts import RunParts
from offbeat.controller.resume import compare
from offbeat.controller.state import HeadState, Highlights, SavedState
from offbeat.data import wire
from offbeat.errors import ConfigError, StorageError
from offbeat.types import Version

TRAINING, WARM_UP = TRAINING_KINDS["train"].checkpoints, "warm-up"
"""First words of the names of checkpoints of `offbeat train`, such as "step-00000050", and of its warm-up."""

_SAVES_APART = 20
"""Least time between two checkpoints by time, as a multiple of the last save's: they take a twentieth of a run's time at most."""

_JOURNAL_S = 5.0
"""Most seconds that a save waits for the journal; a disk that takes nothing must not keep a checkpoint from another one."""

_PARTS: dict[str, Part] = {kind.checkpoints: kind.part for kind in TRAINING_KINDS.values()} | {WARM_UP: TRAINING_KINDS["sft"].part}


@dataclass(frozen=True)
class _Found:
    folder: str
    saved: SavedState
    sealed: bool


def index_of(run_dir: Path, kind: str) -> CheckpointIndex:
    """The checkpoints of a kind in a run's folder."""
    return CheckpointIndex(run_dir / "checkpoints", kind)


def check_heads(folder: Path, saved: SavedState, num_heads: int) -> None:
    """Raise ConfigError, with the way to resume, if another number of processes drew data, since each goes on with its own rows."""
    if saved.heads and len(saved.heads) != num_heads:
        raise ConfigError(
            f"the checkpoint {folder} was written by {len(saved.heads)} processes that draw data, and now there are {num_heads}; resume"
            " with the same rollout.single_rank_load and number of ranks, or change run.name")


def part_of(kind: str) -> Part:
    """Which part of a run saves checkpoints of a kind."""
    return _PARTS[kind]


class Exporter(Protocol):
    """The model of a run, for other programs."""

    async def export(self, folder: Path) -> None:
        """Write it to `folder`."""
        ...


@dataclass(frozen=True)
class ModelExporter:
    """The language model that is trained, as a Hugging Face folder."""

    parts: RunParts

    async def export(self, folder: Path) -> None:
        """See `Exporter.export`."""
        parts = self.parts
        tokenizer = write_tokenizer(parts.inputs, parts.record.run_dir, writes=parts.record.writes)
        await parts.trainers.export(folder, tokenizer=tokenizer)


class RunCheckpoints:
    """The resumable checkpoints of a run or of its warm-up, and its exports."""

    def __init__(self, parts: RunParts, settings: CheckpointConfig, *, kind: str = TRAINING, exporter: "Exporter | None" = None) -> None:
        """`exporter` writes the model; by default the language model that is trained."""
        self._parts = parts
        self._exporter = exporter or ModelExporter(parts)
        self._trainers = parts.trainers
        self._settings = settings
        self._run_dir = parts.record.run_dir
        self._index = index_of(self._run_dir, kind)
        self._critic = parts.critic if kind == TRAINING else None
        self._saved_at_s, self._save_s = time.monotonic(), 0.0
        self._newest: SavedState | None = None

    async def restore(self) -> SavedState | None:
        """Bring the train ranks to the newest checkpoint that is as it was written; None where there never was one.

        Newer ones that are damaged are set aside. The console shows that in a line, and settings and code that have changed since.

        Raises:
            ConfigError: it was written by another number of processes that draw data, or on other data or another model.
            StorageError: there are checkpoints, and all are damaged.
        """
        found = await self._parts.peers.lead("recover", self._find, _Found | None)
        if found is None:
            return None
        check_heads(Path(found.folder), found.saved, self._parts.num_heads)
        folder = Path(found.folder)
        step = await self._trainers.load(folder / "ranks")
        if (critic := self._critic) is not None:
            if (folder / "critic").exists():
                await critic.load(folder / "critic")
            else:
                self._parts.record.note("resuming", "the critic starts over: the checkpoint has none")
        # Only checksums show other damage. With a critic, present or past, steps of the policy and of the run may differ.
        if not found.sealed and step != found.saved.global_step:
            raise StorageError(
                f"the checkpoint {found.folder} is of step {found.saved.global_step}, but the files of its ranks are of step {step}; rename"
                " it, so that the run continues from the one before")
        self._newest = found.saved
        return found.saved

    def overdue(self) -> bool:
        """Whether the present step has to be saved, because the last checkpoint, or this start of the run, is long ago.

        Clocks differ, so the leader's answer is for all peers; see `RunState.agree`.
        """
        every_s = 60 * self._settings.every_minutes
        return every_s > 0 and time.monotonic() - self._saved_at_s >= max(every_s, _SAVES_APART * self._save_s)

    def due(self, global_step: int, *, last: bool) -> bool:
        """Whether to save after this step, by its number."""
        every = self._settings.every_steps
        return last or (every > 0 and global_step % every == 0)

    @property
    def oldest(self) -> int:
        """Step of the oldest complete checkpoint; 0 if there is none."""
        return min(self._index.complete_steps(), default=0)

    def has(self, global_step: int) -> bool:
        """Whether the newest checkpoint is of this step."""
        newest = self._index.newest()
        return newest is not None and newest.step == global_step

    async def save(
        self, global_step: int, *, version: Version, head: HeadState, highlights: Highlights, coefficients: Coefficients | None = None,
        unevaluated: dict[str, float | None] | None = None, unproven: bool = False,
    ) -> None:
        """Write the ranks' part, then the loop's, which declares the checkpoint complete. Waits until engines serve its version.

        Args:
            coefficients: of the next step of reinforcement learning.
            unevaluated: statistics of the last step, if its evaluation is still to come; `amend` follows it.
            unproven: do not wait for engines, in a run that ends because of its engines.

        Raises:
            PublishError: no engine serves the version.
            StorageError: a disk is full; earlier checkpoints are intact.
        """
        start_s = time.monotonic()
        heads = await self._parts.peers.gather("save_heads", head)
        saved = SavedState(
            global_step, version, tuple(heads[: self._parts.num_heads]), highlights, self._parts.inputs.identity, coefficients, unevaluated)

        async def complete() -> None:
            if not unproven:
                await self._parts.publisher.settle()
            await self._sync_journal()
            await asyncio.to_thread(self._index.complete, global_step, wire.encode_json(saved))  # reads all that the ranks wrote
            if unproven:
                return  # earlier ones stay, too
            self._index.prune(self._settings.keep)
            if self._index.kind == TRAINING:
                index_of(self._run_dir, WARM_UP).clear()  # nobody goes back to it

        await self._trainers.save(self._index.folder(global_step) / "ranks")
        if self._critic is not None:
            await self._critic.save(self._index.folder(global_step) / "critic")
        await self._parts.peers.lead("save_complete", complete, None)
        self._newest = saved
        self._saved_at_s = time.monotonic()
        self._save_s = self._saved_at_s - start_s

    async def _sync_journal(self) -> None:
        """Bring the journal to disk first, if that takes no time: groups on hand are in it alone."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_JOURNAL_S):
                await asyncio.wrap_future(self._parts.journal.synced())

    async def amend(self, *, version: Version, highlights: Highlights) -> None:
        """Note the evaluation of its step in the newest checkpoint, with highlights; see `save`. StorageError leaves it as it was."""
        assert self._newest is not None, "there is a checkpoint to amend"
        saved = self._newest = replace(self._newest, version=version, highlights=highlights, unevaluated=None)

        async def amend() -> None:
            await asyncio.to_thread(self._index.amend, saved.global_step, wire.encode_json(saved))

        await self._parts.peers.lead("save_complete", amend, None)

    async def export(self) -> None:
        """Write the final model and the tokenizer as a Hugging Face folder, if configured."""
        if self._settings.export:
            await self._export("export")

    async def export_step(self, global_step: int) -> None:
        """Write the model after this step, if one is due. Comes before its checkpoint, so that a resumed run leaves none out."""
        every = self._settings.export_every_steps
        if every and global_step % every == 0:
            await self._export(f"exports/step-{global_step:08d}")

    async def export_best(self) -> None:
        """Write the model, replacing the best one so far."""
        await self._export("best")

    async def _export(self, folder: str) -> None:
        await self._exporter.export(self._run_dir / folder)

    async def _find(self) -> _Found | None:
        newest, damages = await asyncio.to_thread(self._index.choose)
        if newest is None:
            if finished := [damage for damage in damages if damage.finished]:
                raise none_sound(finished)
            return None
        saved = wire.decode_json(SavedState, newest.payload)
        lines = compare(self._parts.inputs.identity, saved, run_dir=self._run_dir, part=part_of(self._index.kind))
        for line in (*self._set_aside(damages, newest.folder.name), *lines):
            self._parts.record.note("resuming", line)
        return _Found(str(newest.folder), saved, is_sealed(newest.payload))

    def _set_aside(self, damages: Sequence[Damage], instead: str) -> list[str]:
        """Set aside damaged checkpoints that are newer than the chosen one, and return a line on each."""
        lines = []
        for damage in damages:
            kept = f", and kept as {self._index.set_aside(damage.step).name}" if damage.finished else ""
            lines.append(f"{damage}{kept}; the run continues from {instead}")
        return lines
