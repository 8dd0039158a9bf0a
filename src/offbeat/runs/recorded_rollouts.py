"""Records what the rollouts of a run tell: in its events, stored rollouts and journal, and on its console. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from offbeat.data.pieces import Pieces
from offbeat.data.rollout_records import keep_rejected_line
from offbeat.data.stream import PromptStream
from offbeat.data.trajectory import Group
from offbeat.journal.records import CallEntry, GroupSettled, PromptDrawn
from offbeat.journal.run_journal import NoJournal
from offbeat.rollout.outcomes import ON_PURPOSE, RolloutListener, Settled
from offbeat.telemetry.record import RunRecord
from offbeat.types import Version


@dataclass(frozen=True)
class RecordedRollouts(RolloutListener):
    """The listener of a run's rollouts; `journal` gets all of it, and is a `NoJournal` in an evaluation."""

    record: RunRecord
    stream: PromptStream
    pieces: Pieces
    keeps_rejected: bool
    journal: NoJournal

    def on_drawn(self, prompt_id: str, version: Version) -> None:
        self.journal.record(PromptDrawn(prompt_id, version, *self.stream.position))

    def on_finished(self, group: Group) -> None:
        self.journal.finished(group)

    def on_rejected(self, settled: Settled) -> None:
        heard = settled.played.rewards.tolist() if settled.played is not None and settled.kind in ON_PURPOSE else ()
        self.journal.record(GroupSettled(settled.prompt_id, settled.kind, settled.rejected, settled.drawn_again, tuple(heard)))
        self.record.events.record(
            "drawn_again" if settled.drawn_again else "rejected", prompt_id=settled.prompt_id, why=settled.kind, reason=settled.rejected)
        if settled.played is not None and self.keeps_rejected:
            self.record.reject(settled.played.num_tokens, partial(
                keep_rejected_line, group=settled.played, row=self.stream.row(settled.prompt_id), pieces=self.pieces,
                reason=settled.rejected, why=settled.kind, drawn_again=settled.drawn_again))

    def on_unusable(self, prompt_id: str, reasons: Sequence[str]) -> None:
        self.record.events.record("unusable_samples", prompt_id=prompt_id, reasons=reasons)

    def on_heard(self, call: CallEntry) -> None:
        self.journal.heard(call)

    def on_played_again(self, prompt_id: str, *, num_again: int, num_left: int, num_tokens: int) -> None:
        self.record.events.record(
            "played_again", prompt_id=prompt_id, calls_from_journal=num_again, calls_not_asked_again=num_left,
            tokens_from_journal=num_tokens)

    def on_played_anew(self, prompt_id: str, reason: str) -> None:
        self.record.events.record("played_anew", prompt_id=prompt_id, reason=reason)

    def warn(self, text: str) -> None:
        self.record.console.note(text)
