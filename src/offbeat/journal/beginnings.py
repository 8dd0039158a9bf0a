"""Where the processes of a run have begun its journal. Each beginning can be read without the files before it.

A beginning is a segment that starts with `JournalBegun`, followed by what the process had on hand. Called to read a journal, and to
find the files that no checkpoint needs.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from offbeat.errors import DataError
from offbeat.journal.records import JournalBegun, decode_record
from offbeat.journal.segments import Reader, Segment, find


@dataclass(frozen=True)
class JournalBeginning:
    """Where a process has begun the journal.

    Attributes:
        segments: from there on.
        is_whole: whether all that it had on hand is recorded; not so where it was killed meanwhile.
        damage: why not, as a sentence, where no kill explains it; else "".
    """

    begun: JournalBegun
    segments: list[Segment]
    is_whole: bool
    damage: str


def find_beginnings(segments: Sequence[Segment], *, bases: Container[int | None]) -> Iterator[JournalBeginning]:
    """Yield where the journal was begun at the checkpoints of these steps, the newest first; raises StorageError."""
    for start in reversed([each.number for each in segments if each.base in bases]):
        following = [each for each in segments if each.number >= start]
        reader = Reader(following)
        records = iter(reader)
        try:
            begun = next((decode_record(each.payload) for each in islice(records, 1)), None)
        except DataError:
            continue
        if isinstance(begun, JournalBegun):
            is_whole = sum(1 for _ in islice(records, begun.num_held)) == begun.num_held
            is_damaged = not is_whole and reader.cut is not None and not reader.cut.torn
            yield JournalBeginning(begun, following, is_whole, reader.cut.reason if is_damaged and reader.cut is not None else "")


def first_needed(folder: Path, *, oldest: int) -> int | None:
    """Return the number of the first segment that the checkpoints from step `oldest` on need; None if all may be needed.

    It is that of the last whole beginning at the checkpoint or an earlier step, since a process that is killed while it begins leaves its
    records to the beginning before; or of the last one, where none is whole.

    Raises:
        ConfigError: a newer Offbeat has written the journal.
        StorageError: it cannot be read.
    """
    segments = find(folder)
    steps = range(oldest + 1)
    numbers = [each.number for each in segments if each.base in steps]
    if len(numbers) > 1:
        whole = (each.segments[0].number for each in find_beginnings(segments, bases=steps) if each.is_whole)
        return next(whole, numbers[-1])
    return numbers[0] if numbers else None
