"""A run's journal: what was recorded is there for the next process, of the newest checkpoint and of those before it."""

from pathlib import Path

import numpy as np
import pytest

from offbeat.data.stream import StreamState
from offbeat.data.trajectory import Group, Trajectory
from offbeat.journal.records import BatchTaken, CallEntry, HeardSample, JournalHead, PromptDrawn, StepTrained
from offbeat.journal.run_journal import NoJournal, RunJournal, begun_at_start, folder_of
from offbeat.journal.segments import numbers, path_of


def open_journal(folder: Path) -> RunJournal:
    return RunJournal(folder, identity=b"{}", tell=pytest.fail)


def group(prompt_id: str) -> Group:
    length = np.ones(40)
    return Group(prompt_id, 3, (Trajectory(length, length, -length, length, 1.0),) * 2)


def head(*in_flight: str) -> JournalHead:
    return JournalHead(StreamState(0, 5), in_flight)


def test_a_process_that_follows_finds_what_the_one_before_has_recorded(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.record(PromptDrawn("0:9", 3, 0, 9))  # nothing was begun yet
        journal.begin_segment(4, head("0:1", "0:2"), held=[group("0:1")])
        journal.finished(group("0:2"))
        journal.synced().result(10)
        found = journal.read(4)
        assert found is not None and journal.read(5) is None
        standing, reason = found
        assert list(standing.ready) == ["0:1", "0:2"] and standing.identity == b"{}" and not reason
        assert [t.reward for t in standing.ready["0:2"].read().trajectories] == [1.0, 1.0]


def test_records_are_kept_as_long_as_a_checkpoint_needs_them(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.begin_segment(4, head("0:1", "0:2"), held=[group("0:1"), group("0:2")])
        journal.record(BatchTaken(5, ("0:1", "0:2")))
        journal.record(StepTrained(5, b"{}"))
        journal.begin_segment(5, head(), held=[])
        journal.saved(5, oldest=4)
        journal.synced().result(10)
        older = journal.read(4)
        assert older is not None and [step.global_step for step in older[0].steps] == [5]
        assert len(numbers(tmp_path)) == 2
        journal.saved(5, oldest=5)
        journal.synced().result(10)
        assert len(numbers(tmp_path)) == 1 and journal.read(4) is None and journal.read(5) is not None


def test_2000_steps_with_a_checkpoint_now_and_then_take_no_more_disk_than_their_checkpoints_need(tmp_path: Path) -> None:
    largest = 0
    with open_journal(tmp_path) as journal:
        journal.begin_segment(0, head(), held=[])
        for step in range(1, 2001):
            journal.finished(group(f"0:{step}"))
            journal.record(BatchTaken(step, (f"0:{step}",)))
            journal.record(StepTrained(step, b"{}"))
            if step % 20 == 0:
                journal.begin_segment(step, head(), held=[])
                journal.saved(step, oldest=step - 20)
                journal.synced().result(10)
                largest = max(largest, sum(path_of(tmp_path, number).stat().st_size for number in numbers(tmp_path)))
                assert len(numbers(tmp_path)) <= 2
        standing = journal.read(1980)
        assert standing is not None and len(standing[0].steps) == 20
    assert largest < 30 * journal.writer.num_bytes / 2000, "about 21 steps, of 2,000"


def test_1000_finished_groups_are_all_there_for_the_next_process(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.begin_segment(4, head(), held=[])
        for number in range(1000):
            journal.record(PromptDrawn(f"0:{number}", 3, 0, number + 1))
            journal.finished(group(f"0:{number}"))
    with open_journal(tmp_path) as journal:
        found = journal.read(4)
        assert found is not None and list(found[0].ready) == [f"0:{number}" for number in range(1000)] and not found[0].waiting
        held = [each.read() for each in found[0].ready.values()]
        journal.begin_segment(4, head(), held=held)
        journal.synced().result(10)
        again = journal.read(4)
    assert again is not None and len(again[0].ready) == 1000


def test_a_kill_while_a_process_writes_down_what_it_has_on_hand_loses_none_of_it(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.begin_segment(4, head("0:0", "0:1"), held=[])
        for number in range(20):
            journal.finished(group(f"0:{number}"))
    with open_journal(tmp_path) as journal:
        found = journal.read(4)
        assert found is not None and len(found[0].ready) == 20
        held = [each.read() for each in found[0].ready.values()]
        calls = [CallEntry("0:20", 3, 0, b"key", (HeardSample(np.ones(3), -np.ones(3), np.ones(3)),))]
        journal.begin_segment(4, head(*found[0].ready, "0:20"), held=held, calls=calls)
    path = path_of(tmp_path, numbers(tmp_path)[-1])
    whole = path.read_bytes()
    for length in (0, 20, 43, 44, 60, len(whole) // 9, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with open_journal(tmp_path) as journal:
            found = journal.read(4)
        assert found is not None and len(found[0].ready) == 20 and not found[0].heard and not found[1], length
    path.write_bytes(whole)
    with open_journal(tmp_path) as journal:
        found = journal.read(4)
    assert found is not None and len(found[0].ready) == 20 and list(found[0].heard) == ["0:20"]


def test_a_run_that_is_killed_before_its_first_group_has_begun_at_its_start_all_the_same(tmp_path: Path) -> None:
    for _ in range(2):
        with open_journal(folder_of(tmp_path)) as journal:
            journal.begin_segment(0, head(), held=[])
    path = path_of(folder_of(tmp_path), 1)
    path.write_bytes(path.read_bytes()[:50])
    assert begun_at_start(tmp_path) == (b"{}", 1)


def test_steps_that_were_redone_by_a_process_that_was_killed_before_its_checkpoint_are_no_damage(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.begin_segment(4, head("0:1"), held=[group("0:1")])
        journal.record(BatchTaken(5, ("0:1",)))
        journal.record(StepTrained(5, b"{}"))
    with open_journal(tmp_path) as journal:
        journal.begin_segment(5, head(), held=[])
    with open_journal(tmp_path) as journal:
        found = journal.read(4)
    assert found is not None and [step.global_step for step in found[0].steps] == [5] and not found[1]


def test_damage_costs_the_records_after_it_and_is_told(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.begin_segment(4, head(), held=[group("0:1"), group("0:2")])
    path = path_of(tmp_path, numbers(tmp_path)[0])
    data = bytearray(path.read_bytes())
    data[-20] ^= 4
    path.write_bytes(data)
    with open_journal(tmp_path) as journal:
        found = journal.read(4)
    assert found is not None and list(found[0].ready) == ["0:1"] and "is not as it was written from byte" in found[1]


def test_a_run_without_a_journal_records_nothing() -> None:
    journal = NoJournal()
    journal.begin_segment(4, head(), held=[])
    journal.finished(group("0:1"))
    journal.record(StepTrained(5, b"{}"))
    journal.saved(5, oldest=0)
    assert journal.synced().done() and journal.read(4) is None


def test_a_journal_that_begins_with_the_initial_model_tells_with_which_identity_and_how_many_processes(tmp_path: Path) -> None:
    assert begun_at_start(tmp_path) is None
    with open_journal(folder_of(tmp_path)) as journal, open_journal(folder_of(tmp_path, 1)) as other:
        journal.begin_segment(0, head(), held=[])
        other.begin_segment(0, head(), held=[])
        journal.synced().result(10)
        other.synced().result(10)
        assert begun_at_start(tmp_path) == (b"{}", 2)
        journal.begin_segment(5, head(), held=[])
        journal.saved(5, oldest=5)
        journal.synced().result(10)
        assert begun_at_start(tmp_path) is None
