"""Goes on from a checkpoint, or from the initial model, to the point where the run's journal ended: redoes the steps since.

Called by the loop, on every rank, after the ranks have loaded the checkpoint and before any engine has their weights. Steps are redone on
the batches that they had, without engines: the groups are in the journal, with the costs by which their sequences were spread over the
ranks. The weights come out the same, bit for bit. Rows of metrics, evaluations and exports of redone steps are there already, and their
rollouts but for the last ones, which are stored now if the kill came before that.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from offbeat.algorithms.coefficients import Coefficients
from offbeat.config.algorithms import AlgorithmConfig
from offbeat.config.root import TRAINING_KINDS
from offbeat.controller.batches import StepBatches
from offbeat.controller.parts import RunParts
from offbeat.controller.resume import compare
from offbeat.controller.state import HeadState, Highlights, LoopStep, RunState, SavedState
from offbeat.controller.step_training import StepTraining
from offbeat.data import wire
from offbeat.data.batch import Batch
from offbeat.data.cost import CostModel
from offbeat.data.identity import Identity
from offbeat.data.stream import PromptStream, StreamState
from offbeat.data.trajectory import Group
from offbeat.errors import ConfigError
from offbeat.journal.records import StepComputed
from offbeat.journal.standing import HeldGroups, JournalStanding, StoredGroup
from offbeat.ranks.trainers import Trainers

_PART = TRAINING_KINDS["train"].part

Keep = Callable[[LoopStep, Sequence[Group], Batch], Awaitable[None]]
"""Stores the groups and the batch of a step."""


@dataclass(frozen=True)
class Recovered:
    """Where the run goes on.

    Attributes:
        saved: as of a checkpoint of the last step that was done; its one head is this process's.
        num_redone: steps since the checkpoint.
        begins: whether no step is done, and the run has no checkpoint.
    """

    saved: SavedState
    held: HeldGroups
    num_redone: int
    begins: bool = False


@dataclass(frozen=True)
class _Known:
    """How many steps since the checkpoint a process has in its journal; None if it draws no data."""

    num_steps: int | None


class StepRecovery:
    """Reads the journal of this process, and redoes the steps in it."""

    def __init__(
        self, parts: RunParts, batches: StepBatches, training: StepTraining, stream: PromptStream, *, algorithm: AlgorithmConfig,
        keep: Keep,
    ) -> None:
        """`stream` is that of the run, before it is restored; `keep` stores the rollouts of a step that have not been."""
        self._algorithm = algorithm
        self._parts = parts
        self._record = parts.record
        self._batches = batches
        self._training = training
        self._stream = stream
        self._keep = keep

    async def run(self, checkpoint: SavedState | None, state: RunState) -> Recovered:
        """Go on from a checkpoint that the ranks have loaded; from `state` and the initial model where there is none.

        Raises:
            StorageError: the journal cannot be read.
            ConfigError: a newer Offbeat has written it.
            WorkerError: a rank failed.
        """
        saved = self._beginning(state) if checkpoint is None else checkpoint
        standing = await asyncio.to_thread(self._read, saved)
        draws = self._parts.source.draws
        known = await self._parts.peers.gather("recover_steps", _Known(len(standing.steps) if standing else 0 if draws else None))
        num_steps = min((each.num_steps for each in known if each.num_steps is not None), default=0)
        if standing is not None:
            standing.back_to(num_steps)
        states = await self._parts.peers.lead("recover", lambda: _states(standing), tuple[SavedState, ...])
        await self._redo([saved, *states], standing)
        begins = checkpoint is None and not num_steps
        if standing is None:
            return Recovered(_follow(saved, states, saved.heads), HeldGroups(), num_steps, begins)
        held = await asyncio.to_thread(_held, standing)
        heads = (self._head(standing),) * max(len(saved.heads), 1)
        if self._record.writes and (num_steps or held.ready or held.taken):
            self._record.note("recovered", _told(saved.global_step, num_steps, held, from_checkpoint=checkpoint is not None))
        return Recovered(_follow(saved, states, heads), held, num_steps, begins)

    def _beginning(self, state: RunState) -> SavedState:
        heads = (HeadState(self._stream.state(), ()),) * self._parts.num_heads
        return SavedState(0, state.version, heads, state.highlights, self._parts.inputs.identity)

    def _read(self, saved: SavedState) -> JournalStanding | None:
        found = self._parts.journal.read(saved.global_step)
        if found is None:
            return None
        standing, reason = found
        if changed := self._changed(saved, wire.decode_json(Identity, standing.identity)):
            if standing.steps or standing.ready or standing.taken:
                self._record.note("journal", f"the journal is not used: {changed}")
            return None
        if reason:
            self._record.note("journal", f"the journal is used as far as it goes: {reason}")
        return standing

    def _changed(self, saved: SavedState, identity: Identity) -> str:
        """Return the change since the steps were done that would make them come out differently; "" if there is none."""
        try:
            lines = compare(self._parts.inputs.identity, replace(saved, identity=identity), run_dir=self._record.run_dir, part=_PART)
        except ConfigError as exc:
            return str(exc)
        return "; ".join(lines)

    async def _redo(self, states: Sequence[SavedState], standing: JournalStanding | None) -> None:
        algorithm = self._algorithm
        for number, before in enumerate(states[:-1]):
            step = LoopStep(before.global_step + 1, before.version, before.version + 1)
            groups = await asyncio.to_thread(_read_groups, standing.steps[number].groups) if standing is not None else []
            own = Coefficients.of(algorithm, before.coefficients).applied(algorithm)
            batch, _ = await self._batches.take(groups, step, own)
            await self._parts.turns.to_ranks(self._parts.publisher)
            if standing is not None and (cost := standing.steps[number].cost):
                self._parts.trainers.balance_by(CostModel(*cost))  # sums are then rounded in the order that they had
            scored = await self._training.score(batch, groups, step, own)
            await self._training.train(scored.batch, step)
            if not self._record.has_rollouts(step.global_step):
                await self._keep(step, groups, scored.batch.with_columns(**scored.known))
        await self._record.stored()
        if len(states) > 1:
            self._parts.trainers.balance_by(None)

    def _head(self, standing: JournalStanding) -> HeadState:
        """Return where this process stood in its data."""
        self._stream.restore(StreamState(standing.epoch, standing.position, (), standing.curriculum))
        if standing.curriculum is not None:
            self._stream.restore(StreamState(standing.begun_epoch, 0, (), standing.curriculum))
            self._stream.go_on(
                epoch=standing.epoch, position=standing.position,
                results=[(each.epoch, each.prompt_id, each.read()) for each in standing.known_results])
        return HeadState(self._stream.state(), standing.waiting, standing.num_flat_rejected)


def state_of(
    step: LoopStep, highlights: Highlights, coefficients: Coefficients, unevaluated: dict[str, float | None] | None = None,
) -> bytes:
    """Return the loop's state after a step for the journal, with the step's statistics until it has ended."""
    return wire.encode_json(SavedState(step.global_step, step.next_version, (), highlights, None, coefficients, unevaluated))


def computed_by(trainers: Trainers, step: LoopStep) -> StepComputed:
    """Return how the ranks have computed a step that is trained and published, for the journal."""
    cost = trainers.balanced_by
    return StepComputed(step.global_step, (cost.linear, cost.quadratic, cost.constant), trainers.fingerprint)


def finite(stats: Mapping[str, float]) -> dict[str, float | None]:
    """Return statistics for JSON, where None is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in stats.items()}


async def _states(standing: JournalStanding | None) -> tuple[SavedState, ...]:
    return tuple(wire.decode_json(SavedState, step.state) for step in (standing.steps if standing else ()) if step.state is not None)


def _follow(saved: SavedState, states: Sequence[SavedState], heads: tuple[HeadState, ...]) -> SavedState:
    return replace(states[-1] if states else saved, heads=heads, identity=saved.identity)


def _held(standing: JournalStanding) -> HeldGroups:
    ready = tuple(standing.ready.values())
    taken = standing.taken.groups if standing.taken is not None else ()
    return HeldGroups(tuple(_read_groups(ready)), tuple(_read_groups(taken)), dict(standing.num_tries), standing.read_open())


def _read_groups(stored: Sequence[StoredGroup]) -> list[Group]:
    return [each.read() for each in stored]


def _told(step: int, num_steps: int, held: HeldGroups, *, from_checkpoint: bool) -> str:
    num_groups = len(held.ready) + len(held.taken)
    are = "are" if num_steps != 1 else "is"
    redone = f"{num_steps} step{'s' if num_steps != 1 else ''}{f' after step {step}' if from_checkpoint else ''} {are} redone"
    groups = f"{num_groups} finished group{'s' if num_groups != 1 else ''} {'are' if num_groups != 1 else 'is'} kept"
    begun = "goes further than the checkpoint" if from_checkpoint else "goes on from the initial model"
    return f"the journal {begun}: {redone if num_steps else 'no step is redone'}, and {groups}"
