"""Saves the steps of a run: when a checkpoint is due, and the last whole step when the user or an error ends the run.

Called by the loop, which says when the ranks begin and end to train a step, and when it is recorded. In SPMD mode every rank calls it.
"""

from collections.abc import Awaitable, Callable

from offbeat.algorithms.coefficients import Coefficients
from offbeat.controller.checkpoints import RunCheckpoints
from offbeat.controller.parts import Rollouts, RunParts
from offbeat.controller.state import HeadState, LoopStep, RunState
from offbeat.data.stream import PromptStream
from offbeat.data.trajectory import Group
from offbeat.errors import OffbeatError
from offbeat.journal.records import JournalHead


class Rescue:
    """Knows the last whole step, and what a checkpoint of it holds.

    Attributes:
        coefficients: of the next step.
        rollouts: those that feed the steps; None before there are any.
        taken: groups taken for a step that has not been trained yet.
        left: does what is left to record of the last whole step, if an error ends the run before the loop has done that; else None.
        unwritten: statistics of that step, once it is in the journal and until its row of metrics is written.
    """

    def __init__(
        self, parts: RunParts, state: RunState, stream: PromptStream, checkpoints: RunCheckpoints, coefficients: Coefficients,
    ) -> None:
        self._parts = parts
        self._state = state
        self._stream = stream
        self._checkpoints = checkpoints
        self.coefficients = coefficients
        self.rollouts: Rollouts | None = None
        self.taken: list[Group] = []
        self.unwritten: dict[str, float | None] | None = None
        self.left: Callable[[], Awaitable[object]] | None = None
        self._whole: LoopStep | None = None
        """The step whose weights the ranks have; None while a step trains."""

    def begin_step(self) -> None:
        """Note that ranks train: from here on, their weights are of no whole step."""
        self._whole = None

    def end_step(self, step: LoopStep) -> None:
        """Note that a step is trained."""
        self._whole, self.taken = step, []

    async def save_step(self, step: LoopStep, *, unproven: bool = False) -> None:
        """Save a checkpoint of a step; `unproven` does not wait for engines to serve its version."""
        rollouts, record, state = self.rollouts, self._parts.record, self._state
        assert rollouts is not None, "a step that is done had rollouts"
        await record.stored()  # a resumed run does not write this step's rollouts again
        with record.tracer.span("checkpoint", "controller"):
            head = self.begin_journal(step.global_step, rollouts)
            await self._checkpoints.save(
                step.global_step, version=step.next_version, head=head, highlights=state.highlights, coefficients=self.coefficients,
                unevaluated=state.unevaluated or self.unwritten, unproven=unproven)
        self._parts.journal.saved(step.global_step, oldest=self._checkpoints.oldest)
        record.events.record("checkpoint", global_step=step.global_step)

    def begin_journal(self, global_step: int, rollouts: Rollouts) -> HeadState:
        """Begin the journal anew, at the checkpoint of a step or where the run goes on; returns where this process stands in its data."""
        in_flight = (*(group.prompt_id for group in self.taken), *rollouts.in_flight)
        head = HeadState(self._stream.state(), in_flight, rollouts.num_flat_rejected)
        self._parts.journal.begin_segment(
            global_step, JournalHead(head.stream, head.in_flight, head.num_flat_rejected, dict(rollouts.num_tries)),
            held=(*self.taken, *rollouts.held), calls=rollouts.calls)
        return head

    async def save_last(self) -> None:
        """Save the last whole step, unless there is a checkpoint of it."""
        if step := await self._unsaved():
            await self.save_step(step)

    async def save_after_error(self) -> None:
        """Save the last whole step, after any error has ended the run, if the ranks still can.

        It comes into the journal in any case, which would otherwise go on from a step that it does not have. Prompts that have failed too
        often since do not return in this epoch.
        """
        if self.rollouts is None or (step := await self._unsaved()) is None:
            return
        try:
            if self.left is not None:
                await self.left()
            if step.global_step == self._state.total_steps:
                await self._checkpoints.export()
            await self.save_step(step, unproven=True)
        except (OffbeatError, OSError) as exc:
            self._parts.record.note("not_saved", f"no checkpoint of step {step.global_step} could be saved: {exc}")
        else:
            self._parts.record.console.note(f"the run ends after step {step.global_step}, of which a checkpoint is saved")

    async def _unsaved(self) -> LoopStep | None:
        """Return the last step that was done, if the ranks have its weights and no checkpoint is of it."""
        step = self._whole

        async def is_unsaved() -> bool:
            return step is not None and not self._checkpoints.has(step.global_step)

        return step if await self._parts.peers.lead("unsaved", is_unsaved, bool) else None
