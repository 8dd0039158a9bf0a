"""The journal of a run: records what the rollouts and the loop do, and reads it when the run goes on.

Opened by `runs.assemble` and `spmd.rank`, in each process that draws data; written by the loop and by the rollouts' listener. Recording
never waits, and never raises. What each record means is in `records`.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Self

from offbeat.data.trajectory import Group
from offbeat.errors import DataError
from offbeat.journal.beginnings import find_beginnings
from offbeat.journal.records import CallEntry, CheckpointKept, GroupEntry, JournalBegun, JournalHead, Record, RecordEntry
from offbeat.journal.segments import Reader, find
from offbeat.journal.standing import JournalStanding
from offbeat.journal.writer import JournalWriter
from offbeat.types import Tell


def folder_of(run_dir: Path, head: int = 0) -> Path:
    """Return the folder of the journal of a process that draws data, the `head`th of the run's."""
    folder = run_dir / "journal"
    return folder / f"head-{head}" if head else folder


def begun_at_start(run_dir: Path) -> tuple[bytes, int] | None:
    """Return JSON of the identity with which a run's journal goes on from the initial model, and the number of processes that draw data.

    None if there is no such journal.

    Raises:
        ConfigError: a newer Offbeat has written it.
        StorageError: it cannot be read.
    """
    folder = folder_of(run_dir)
    newest = next(find_beginnings(find(folder), bases=(0,)), None)
    num_heads = 1 + sum(path.is_dir() for path in folder.glob("head-*"))
    return None if newest is None else (newest.begun.identity, num_heads)


class NoJournal:
    """The journal of a process that records nothing."""

    def record(self, record: Record) -> None:
        """Record nothing."""

    def finished(self, group: Group) -> None:
        """Record nothing."""

    def heard(self, call: CallEntry) -> None:
        """Record nothing."""

    def begin_segment(self, global_step: int, head: JournalHead, *, held: Sequence[Group], calls: Sequence[CallEntry] = ()) -> None:
        """Record nothing."""

    def saved(self, global_step: int, *, oldest: int) -> None:
        """Record nothing."""

    def synced(self) -> "Future[None]":
        """Return a future that is done."""
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read(self, base: int) -> tuple[JournalStanding, str] | None:  # noqa: ARG002
        """Return None: there are no records."""
        return None


class RunJournal(NoJournal):
    """The journal in a folder of a run. Use as `with`; on leaving, what waits is written."""

    def __init__(self, folder: Path, *, identity: bytes, tell: Tell, keeps_all: bool = False) -> None:
        """Open it.

        Args:
            identity: JSON of the run's `Identity`.
            keeps_all: whether records stay that no checkpoint needs.
            tell: shows a sentence on a disk that takes nothing; called from another thread.
        """
        self.writer = JournalWriter(folder, tell=tell)
        self._folder = folder
        self._identity = identity
        self._keeps_all = keeps_all

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.writer.close()

    def record(self, record: Record) -> None:
        """Append a record."""
        self.writer.append(RecordEntry(record))

    def finished(self, group: Group) -> None:
        """Append a group that is ready to be trained on."""
        self.writer.append(GroupEntry(group))

    def heard(self, call: CallEntry) -> None:
        """Append an answered call of a group that still runs."""
        self.writer.append(call)

    def begin_segment(self, global_step: int, head: JournalHead, *, held: Sequence[Group], calls: Sequence[CallEntry] = ()) -> None:
        """Begin anew at the checkpoint of a step that is about to be saved, or at the point from which the run goes on.

        Args:
            held: all groups that are ready, or taken by a step that has not been trained.
            calls: all answered calls of groups that still run.
        """
        begun = RecordEntry(JournalBegun(global_step, self._identity, head, len(held) + len(calls)))
        self.writer.begin_segment(global_step, [begun, *map(GroupEntry, held), *calls])

    def saved(self, global_step: int, *, oldest: int) -> None:
        """Note that the checkpoint of a step is complete, and drop the records that only checkpoints before step `oldest` need.

        Without effect on the records of a journal that `keeps_all`.
        """
        self.record(CheckpointKept(global_step))
        if not self._keeps_all:
            self.writer.drop(oldest)

    def synced(self) -> "Future[None]":
        """Return a future that is done when all records are on disk."""
        return self.writer.synced()

    def read(self, base: int) -> tuple[JournalStanding, str] | None:
        """Return where the run stood when the records that continue the checkpoint of step `base` ended; None if there are none.

        Beside the state, it says why later records are not used, in a sentence; "" if all are.

        Raises:
            ConfigError: a newer Offbeat has written the journal.
            StorageError: it cannot be read.
        """
        beginnings = list(find_beginnings(find(self._folder), bases=(base,)))
        if not beginnings:
            return None
        # What a killed process had not recorded whole, the process before it has.
        chosen = next((each for each in beginnings if each.is_whole), beginnings[0])
        standing, reader = JournalStanding(base), Reader(chosen.segments)
        try:
            standing.follow(reader)
        except DataError as exc:
            return standing, str(exc)
        cut = "" if reader.cut is None or reader.cut.torn else reader.cut.reason
        return standing, cut or beginnings[0].damage
