"""All steps in a journal, over every start of a run and from older versions of Offbeat."""

import shutil
from pathlib import Path

import numpy as np

from offbeat.data.stream import StreamState
from offbeat.data.trajectory import Group
from offbeat.journal.history import read_history
from offbeat.journal.records import BatchTaken, GroupSettled, JournalHead, StepComputed, StepTrained
from offbeat.journal.run_journal import RunJournal
from offbeat.journal.segments import find

OLDER = Path(__file__).parent / "older" / "7810141c"
"""A journal of format 1, as that revision wrote it."""

HEAD = JournalHead(StreamState(0, 0), ())


def record_steps(journal: RunJournal, *numbers: int, finished: bool = False) -> None:
    """Record steps of one group each, whose groups may be there already."""
    for number in numbers:
        if not finished:
            journal.finished(Group(f"0:{number}", number))
        journal.record(BatchTaken(number, (f"0:{number}",)))
        journal.record(StepComputed(number, (1.0, 2.0, 0.1), f"weights {number}"))
        journal.record(StepTrained(number, b"state %d" % number))


def open_journal(folder: Path, *, keeps_all: bool = True) -> RunJournal:
    return RunJournal(folder, identity=b"who", tell=print, keeps_all=keeps_all)


def test_the_history_has_the_steps_of_all_starts_with_their_groups(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.begin_segment(0, HEAD, held=[])
        record_steps(journal, 1, 2)
        journal.begin_segment(2, HEAD, held=[Group("0:3", 2)])
        journal.saved(2, oldest=2)
        record_steps(journal, 3, finished=True)
        journal.record(BatchTaken(4, ()))  # not trained before the process was killed
    with open_journal(tmp_path) as journal:
        journal.begin_segment(3, HEAD, held=[Group("0:4", 3)])
        record_steps(journal, 4, finished=True)
    history = read_history(tmp_path)
    assert list(history.steps) == [1, 2, 3, 4] and not history.cuts
    last = history.steps[4]
    assert (last.state, last.identity, last.computed) == (b"state 4", b"who", StepComputed(4, (1.0, 2.0, 0.1), "weights 4"))
    assert [each.read().prompt_id for each in last.groups] == ["0:4"]


def test_the_history_tells_how_often_prompts_had_failed(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.begin_segment(0, JournalHead(StreamState(0, 0), (), num_tries={"0:2": 2}), held=[])
        journal.record(GroupSettled("0:1", "timed out", "late", True))
        journal.record(GroupSettled("0:1", "too stale", "old", True))
        record_steps(journal, 1, 2, 3)
    assert [step.num_tries for step in read_history(tmp_path).steps.values()] == [{"0:1": 1}, {"0:2": 2}, {}]


def test_steps_that_the_run_has_gone_back_behind_are_replaced(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.begin_segment(0, HEAD, held=[])
        record_steps(journal, 1, 2, 3)
        journal.begin_segment(1, HEAD, held=[])
        journal.record(BatchTaken(2, ()))
        journal.record(StepTrained(2, b"another"))
    assert {number: step.state for number, step in read_history(tmp_path).steps.items()} == {1: b"state 1", 2: b"another"}


def test_without_keeping_all_the_history_begins_at_the_oldest_checkpoint(tmp_path: Path) -> None:
    with open_journal(tmp_path, keeps_all=False) as journal:
        journal.begin_segment(0, HEAD, held=[])
        record_steps(journal, 1)
        journal.begin_segment(1, HEAD, held=[])
        journal.saved(1, oldest=1)
        record_steps(journal, 2)
    assert list(read_history(tmp_path).steps) == [2]
    assert not read_history(tmp_path / "none").steps


def test_damage_ends_the_steps_of_one_start_alone_and_is_told(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.begin_segment(0, HEAD, held=[])
        record_steps(journal, 1, 2)
    path = find(tmp_path)[0].path
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    data[-20] ^= 1
    path.write_bytes(data.tobytes())
    with open_journal(tmp_path) as journal:
        journal.begin_segment(2, HEAD, held=[])
        record_steps(journal, 3)
    history = read_history(tmp_path)
    assert list(history.steps) == [1, 3] and path.name in history.cuts[0]


def test_a_journal_of_format_1_is_read_and_gone_on_from(tmp_path: Path) -> None:
    shutil.copytree(OLDER, tmp_path / "journal")
    with open_journal(tmp_path / "journal") as journal:
        found = journal.read(0)
        assert found is not None and not found[1]
        standing = found[0]
        assert standing.identity == b'{"who": "a run"}'
        assert [step.state for step in standing.steps] == [b'{"global_step": 1, "ended": true}']
        assert standing.waiting == ("0:2", "0:3", "0:4") and standing.num_tries == {"0:2": 1}
        ready = standing.ready["0:0"].read()
        assert [t.tokens.tolist() for t in ready.trajectories] == [[5, 6, 7], [5, 6, 7, 8, 9, 10]]
        (call,) = standing.read_open()["0:3"].calls
        assert [each.tokens.tolist() for each in call.answers] == [[5, 6, 7], [8]]
        journal.begin_segment(1, HEAD, held=[ready])
        journal.record(BatchTaken(2, ("0:0",)))
        journal.record(StepTrained(2, b"two"))
    history = read_history(tmp_path / "journal")
    assert list(history.steps) == [1, 2] and not history.cuts
    assert [each.read().prompt_id for step in history.steps.values() for each in step.groups] == ["0:1", "0:0"]
