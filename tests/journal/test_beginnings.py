"""Where a journal was begun, and which of its files checkpoints still need."""

from pathlib import Path

import numpy as np
import pytest

from offbeat.data.stream import StreamState
from offbeat.data.trajectory import Group, Trajectory
from offbeat.journal.beginnings import find_beginnings, first_needed
from offbeat.journal.records import BatchTaken, JournalHead, StepTrained
from offbeat.journal.run_journal import RunJournal
from offbeat.journal.segments import HEADER_BYTES, find, numbers, path_of

HEAD = JournalHead(StreamState(0, 5), ())


def open_journal(folder: Path) -> RunJournal:
    return RunJournal(folder, identity=b"{}", tell=pytest.fail)


def group(prompt_id: str) -> Group:
    length = np.ones(40)
    return Group(prompt_id, 3, (Trajectory(length, length, -length, length, 1.0),) * 2)


def begin(folder: Path, step: int, *held: str, trains: int = 0, kept_bytes: int | None = None) -> None:
    """A process that begins a journal, and may train a step on what it has on hand; `kept_bytes` is what a kill leaves of its file."""
    with open_journal(folder) as journal:
        journal.begin_segment(step, HEAD, held=[group(each) for each in held])
        if trains:
            journal.record(BatchTaken(trains, held))
            journal.record(StepTrained(trains, b"{}"))
    path = path_of(folder, numbers(folder)[-1])
    path.write_bytes(path.read_bytes()[:kept_bytes])


def test_beginnings_are_found_with_what_is_missing_in_them(tmp_path: Path) -> None:
    begin(tmp_path, 0, "0:1")
    begin(tmp_path, 4, "0:2", "0:3")
    begin(tmp_path, 4, "0:2", "0:3", kept_bytes=-1)
    begin(tmp_path, 4, kept_bytes=HEADER_BYTES + 3)
    found = list(find_beginnings(find(tmp_path), bases=(4,)))
    assert [(each.segments[0].number, each.begun.num_held, each.is_whole, each.damage) for each in found] == [
        (2, 2, False, ""), (1, 2, True, "")]
    damaged = bytearray(path_of(tmp_path, 1).read_bytes())
    damaged[-30] ^= 1
    path_of(tmp_path, 1).write_bytes(damaged)
    last = list(find_beginnings(find(tmp_path), bases=range(5)))[1:]
    assert [each.is_whole for each in last] == [False, True] and "00000001.log is not as it was written" in last[0].damage


@pytest.mark.parametrize("kept_bytes", [HEADER_BYTES, HEADER_BYTES + 30, -100, -1])
def test_records_stay_that_the_oldest_checkpoint_needs_since_a_process_was_killed_while_it_began_anew(
    tmp_path: Path, kept_bytes: int,
) -> None:
    begin(tmp_path, 4, "0:1", "0:2", trains=5)
    begin(tmp_path, 4, "0:3", "0:4", kept_bytes=kept_bytes)
    with open_journal(tmp_path) as journal:
        found = journal.read(4)
        assert found is not None and [step.global_step for step in found[0].steps] == [5]
        journal.begin_segment(5, HEAD, held=[])
        journal.saved(5, oldest=4)
        journal.synced().result(10)
        found = journal.read(4)  # the checkpoint of step 5 turns out to be damaged
        assert found is not None and [step.global_step for step in found[0].steps] == [5]
        journal.saved(5, oldest=5)
        journal.synced().result(10)
        assert len(numbers(tmp_path)) == 1


def test_segments_are_needed_from_the_last_whole_beginning_on(tmp_path: Path) -> None:
    assert first_needed(tmp_path, oldest=4) is None
    begin(tmp_path, 4, "0:1", kept_bytes=-1)
    begin(tmp_path, 4, "0:1", kept_bytes=-1)
    assert (first_needed(tmp_path, oldest=3), first_needed(tmp_path, oldest=4)) == (None, 1)
    begin(tmp_path, 4, "0:1")
    begin(tmp_path, 8, kept_bytes=-1)
    assert (first_needed(tmp_path, oldest=7), first_needed(tmp_path, oldest=8)) == (2, 2)
    begin(tmp_path, 8)
    assert (first_needed(tmp_path, oldest=7), first_needed(tmp_path, oldest=9)) == (2, 4)
