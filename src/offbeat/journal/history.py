"""The whole history in a journal: all steps that were done, over every start of a run. Called for runs that are replayed or compared.

`standing` says where a run goes on; here, steps before its last checkpoint count as well, as far as their records are still there.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.errors import DataError
from offbeat.journal.records import (
    BatchTaken,
    GroupFinished,
    GroupSettled,
    JournalBegun,
    StepComputed,
    StepEnded,
    StepTrained,
    decode_record,
)
from offbeat.journal.segments import Reader, Segment, Stored, find
from offbeat.journal.standing import StoredGroup


@dataclass(frozen=True)
class PastStep:
    """A step that was done.

    Attributes:
        groups: the groups that it trained on, in order.
        state: JSON of the loop's state after it; see `StepTrained`.
        computed: how it was computed; None in the journal of an older version.
        identity: JSON of the run's identity then.
        num_tries: how often prompts of its groups had failed before, by id; those that had not are left out.
    """

    global_step: int
    groups: tuple[StoredGroup, ...]
    state: bytes
    computed: StepComputed | None
    identity: bytes
    num_tries: dict[str, int] = field(default_factory=dict)


@dataclass
class JournalHistory:
    """A journal's `steps` by number, ascending, perhaps with gaps; `cuts` has a sentence on each place where records are damaged."""

    steps: dict[int, PastStep] = field(default_factory=dict)
    cuts: list[str] = field(default_factory=list)
    _identity: bytes = b""
    _ready: dict[str, StoredGroup] = field(default_factory=dict)
    _taken: dict[int, tuple[StoredGroup, ...]] = field(default_factory=dict)
    _computed: dict[int, StepComputed] = field(default_factory=dict)
    _tries: Counter[str] = field(default_factory=Counter)

    def take_up(self, stored: Stored) -> None:
        """Take up the next record; raises DataError if it is none."""
        match record := decode_record(stored.payload):
            case JournalBegun(step, identity):
                self._identity, self._ready, self._taken, self._computed = identity, {}, {}, {}
                self._tries |= Counter(record.head.num_tries)
                # The run has gone back to this step: what followed it is not part of the history any more.
                self.steps = {number: past for number, past in self.steps.items() if number <= step}
            case GroupFinished(prompt_id):
                self._ready[prompt_id] = StoredGroup(prompt_id, stored.place)
            case GroupSettled(prompt_id, kind):
                self._tries[prompt_id] += record.again and kind != "too stale"
            case BatchTaken(step, prompt_ids):
                if not self._ready.keys() >= set(prompt_ids):
                    raise DataError(f"the batch of step {step} has groups that are not recorded")
                self._taken[step] = tuple(self._ready.pop(each) for each in prompt_ids)
            case StepComputed(step):
                self._computed[step] = record
            case StepTrained(step, state):
                if step in self._taken:
                    groups = self._taken.pop(step)
                    tries = {each.prompt_id: num for each in groups if (num := self._tries[each.prompt_id])}
                    self.steps[step] = PastStep(step, groups, state, self._computed.get(step), self._identity, tries)
            case StepEnded():
                pass  # the state after an evaluation, which no later step reads
            case _:
                pass


def read_history(folder: Path) -> JournalHistory:
    """Read a journal such as `runs/NAME/journal`; empty if missing.

    Raises ConfigError if a newer Offbeat has written it, StorageError if it cannot be read.
    """
    history = JournalHistory()
    for segments in _lives(find(folder)):
        reader = Reader(segments)
        try:
            for stored in reader:
                history.take_up(stored)
        except DataError as exc:
            history.cuts.append(f"{segments[0].path.name}: {exc}")
        if reader.cut is not None and not reader.cut.torn:
            history.cuts.append(reader.cut.reason)
    return history


def _lives(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Return the segments in parts that each begin with the state of the run, so that they can be read without those before."""
    parts: list[list[Segment]] = []
    for segment in segments:
        if segment.base is not None:
            parts.append([segment])
        elif parts:
            parts[-1].append(segment)
    return parts
