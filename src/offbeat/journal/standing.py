"""Where a run stood when its journal ended: the steps done since a checkpoint, the groups on hand, and the prompts still to be answered.

Pure but for reading groups again from their places. A journal holds a prefix of the history of a run, and any prefix gives a state that the
run was in, or could have been in.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from offbeat.data.curriculum import CurriculumState
from offbeat.data.trajectory import Group
from offbeat.errors import DataError
from offbeat.journal.records import (
    BatchTaken,
    CallHeard,
    CheckpointKept,
    GroupFinished,
    GroupSettled,
    HeardSample,
    JournalBegun,
    PromptDrawn,
    StepComputed,
    StepEnded,
    StepTrained,
    decode_record,
    unpack,
    unpack_answers,
)
from offbeat.journal.segments import RecordPlace, Stored
from offbeat.types import Version


@dataclass(frozen=True)
class StoredGroup:
    """A group in a journal."""

    prompt_id: str
    place: RecordPlace

    def read(self) -> Group:
        """Read the group; raises StorageError if the journal cannot be read, DataError if it has changed since."""
        record = decode_record(self.place.read())
        if not isinstance(record, GroupFinished):
            raise DataError(f"{self.place.path} has changed since it was opened")
        return unpack(record.packed)


@dataclass(frozen=True)
class RecordedStep:
    """A step that was taken and, with a `state`, done.

    Attributes:
        groups: the groups that it trains on, in order.
        state: see `StepTrained`; None while the step trains.
        cost: see `StepComputed`; None in the journal of an older version.
    """

    global_step: int
    groups: tuple[StoredGroup, ...]
    state: bytes | None = None
    cost: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class HeardCall:
    """A call of a group that ran, and what engines have answered; see `CallHeard`."""

    key: bytes
    answers: tuple[HeardSample, ...]


@dataclass(frozen=True)
class OpenGroup:
    """A group that ran when the journal ended, with the calls that were answered; `version` is the one at which it was admitted."""

    version: Version
    calls: tuple[HeardCall, ...]


@dataclass(frozen=True)
class HeldGroups:
    """Groups that a run has when it goes on, besides its prompts.

    Attributes:
        ready: finished, and not taken by any step.
        taken: taken by the step that follows, in its order; none if it has not begun.
        num_tries: how often prompts in flight have failed, by id.
        open: groups with answered calls that are to be played again, by prompt.
    """

    ready: tuple[Group, ...] = ()
    taken: tuple[Group, ...] = ()
    num_tries: dict[str, int] = field(default_factory=dict)
    open: dict[str, OpenGroup] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """Rewards of a prompt that was settled while the stream was in this epoch, or the group that has them; for a curriculum.

    `step` is the one that has taken the group; None if it is not trained on.
    """

    prompt_id: str
    rewards: tuple[float, ...] | StoredGroup
    epoch: int
    step: int | None = None

    def read(self) -> tuple[float, ...]:
        """Return the rewards; raises as `StoredGroup.read`."""
        return tuple(self.rewards.read().rewards.tolist()) if isinstance(self.rewards, StoredGroup) else self.rewards


@dataclass
class _Heard:
    """Where answers to the calls of a group lie that was admitted at a version, in order."""

    version: Version
    places: list[RecordPlace] = field(default_factory=list)


@dataclass
class JournalStanding:
    """The state after each record.

    Attributes:
        base: step of the checkpoint that the records continue.
        returned: prompts that are to be drawn first, in this order.
        epoch, position: where the stream of prompts stands.
        curriculum: its results, without `results`.
        num_flat_rejected: groups of equal rewards rejected for the batch that is being filled.
        steps: steps since the checkpoint that were done, in order.
        taken: the step that was begun after them.
        ready: finished groups that no step has taken, by prompt, in order of finishing.
        results: of prompts that were settled, or taken by a step, since `curriculum`.
        begun_epoch: that of the stream at `curriculum`.
        identity: JSON of the run's identity; empty before the first record.
        heard: answers to calls of running groups, by prompt.
    """

    base: int
    returned: dict[str, None] = field(default_factory=dict)
    epoch: int = 0
    position: int = 0
    curriculum: CurriculumState | None = None
    begun_epoch: int = 0
    num_flat_rejected: int = 0
    running: dict[str, None] = field(default_factory=dict)
    steps: list[RecordedStep] = field(default_factory=list)
    taken: RecordedStep | None = None
    ready: dict[str, StoredGroup] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    num_tries: Counter[str] = field(default_factory=Counter)
    identity: bytes = b""
    heard: dict[str, _Heard] = field(default_factory=dict)

    def follow(self, records: Iterable[Stored]) -> None:
        """Take up the records in order; raises DataError if one, of another checkpoint, does not follow from those before it."""
        for stored in records:
            self._take_up(stored)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Prompts that were drawn and have to be drawn again, first those that were given back."""
        return (*self.returned, *(each for each in self.running if each not in self.returned))

    @property
    def known_results(self) -> list[Result]:
        """Results without those of groups that a step still has to train on: a run that goes on hears of these in that step."""
        return [each for each in self.results if each.step is None or each.step <= self._last]

    def read_open(self) -> dict[str, OpenGroup]:
        """Read the groups that are to be played again and have answered calls; raises as `StoredGroup.read`."""
        return {prompt_id: OpenGroup(heard.version, _calls(heard.places)) for prompt_id, heard in self.heard.items()}

    def back_to(self, num_steps: int) -> None:
        """Go back to the state after so many of the steps, because other processes of the run have not done the ones after."""
        while len(self.steps) > num_steps:
            if self.taken is not None:
                self.ready = {each.prompt_id: each for each in self.taken.groups} | self.ready
            self.taken = replace(self.steps.pop(), state=None)

    def _take_up(self, stored: Stored) -> None:
        match record := decode_record(stored.payload):
            case JournalBegun():
                self._start(record)
            case PromptDrawn(prompt_id, version):
                if prompt_id in self.heard and self.heard[prompt_id].version != version:
                    del self.heard[prompt_id]  # it is played anew
                if prompt_id in self.returned:
                    del self.returned[prompt_id]
                self.epoch, self.position = record.epoch, record.position
                self.running[prompt_id] = None
            case GroupFinished(prompt_id):
                self._leaves(prompt_id)
                del self.num_tries[prompt_id]
                if self.taken is None or all(each.prompt_id != prompt_id for each in self.taken.groups):
                    self.ready[prompt_id] = StoredGroup(prompt_id, stored.place)
            case GroupSettled(prompt_id):
                self._settle(record)
            case BatchTaken(step, prompt_ids):
                self._begin(step, prompt_ids)
            case StepTrained(step, state) | StepEnded(step, state):
                self._end(step, state)
            case CallHeard(prompt_id, version):
                self.heard.setdefault(prompt_id, _Heard(version)).places.append(stored.place)
            case StepComputed(step, cost):
                if self.taken is not None and self.taken.global_step == step:
                    self.taken = replace(self.taken, cost=cost)
            case CheckpointKept():
                pass

    def _start(self, record: JournalBegun) -> None:
        if record.global_step != self._last:
            raise DataError(f"the journal goes on from step {record.global_step} after step {self._last}")
        head = record.head
        taken = {each.prompt_id for each in self.taken.groups} if self.taken is not None else set()
        self.identity, self.num_tries, self.num_flat_rejected = record.identity, Counter(head.num_tries), head.num_flat_rejected
        self.epoch, self.position, self.curriculum = head.stream.epoch, head.stream.position, head.stream.curriculum
        waiting = (*head.stream.returned, *head.in_flight)
        self.returned = {each: None for each in waiting if each not in self.ready and each not in taken}
        self.running, self.results, self.heard, self.begun_epoch = {}, [], {}, self.epoch

    @property
    def _last(self) -> int:
        return self.steps[-1].global_step if self.steps else self.base

    def _leaves(self, prompt_id: str) -> None:
        self.running.pop(prompt_id, None)
        self.returned.pop(prompt_id, None)
        self.heard.pop(prompt_id, None)

    def _settle(self, record: GroupSettled) -> None:
        self._leaves(record.prompt_id)
        if record.again:
            self.returned[record.prompt_id] = None
            self.num_tries[record.prompt_id] += record.kind != "too stale"
            return
        del self.num_tries[record.prompt_id]
        self.num_flat_rejected += record.kind == "equal rewards"
        if record.rewards:
            self.results.append(Result(record.prompt_id, record.rewards, self.epoch))

    def _begin(self, step: int, prompt_ids: tuple[str, ...]) -> None:
        if self.taken is not None and self.taken.global_step == step:  # a process was killed in this step, and the next one begins it anew
            self.ready = {each.prompt_id: each for each in self.taken.groups} | self.ready
        if step != self._last + 1 or not self.ready.keys() >= set(prompt_ids):
            raise DataError(f"the journal takes the batch of step {step} after step {self._last}, of groups that it does not have")
        self.taken = RecordedStep(step, tuple(self.ready.pop(each) for each in prompt_ids))
        self.results += [Result(each.prompt_id, each, self.epoch, step) for each in self.taken.groups]
        self.num_flat_rejected = 0

    def _end(self, step: int, state: bytes) -> None:
        if self.taken is not None and self.taken.global_step == step:
            self.steps.append(replace(self.taken, state=state))
            self.taken = None
        elif self.steps and step == self._last:
            self.steps[-1] = replace(self.steps[-1], state=state)
        elif step != self.base:
            raise DataError(f"the journal ends step {step} after step {self._last}")


def _calls(places: Iterable[RecordPlace]) -> tuple[HeardCall, ...]:
    calls: dict[int, HeardCall] = {}
    for place in places:
        record = decode_record(place.read())
        if not isinstance(record, CallHeard):
            raise DataError(f"{place.path} has changed since it was opened")
        new, before = unpack_answers(record.packed), calls.get(record.number)
        answers = new if before is None else tuple(old.followed_by(more) for old, more in zip(before.answers, new, strict=True))
        calls[record.number] = HeardCall(record.key, answers)
    return tuple(calls.values())
