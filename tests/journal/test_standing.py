"""The state that follows from a journal, for any prefix of the records of a history."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from offbeat.data.stream import StreamState
from offbeat.data.trajectory import Group
from offbeat.errors import DataError
from offbeat.journal.records import (
    BatchTaken,
    CallEntry,
    CheckpointKept,
    GroupEntry,
    GroupSettled,
    HeardSample,
    JournalBegun,
    JournalHead,
    PromptDrawn,
    Record,
    RecordEntry,
    StepEnded,
    StepTrained,
)
from offbeat.journal.segments import RecordPlace, Stored
from offbeat.journal.standing import JournalStanding

BATCH = 2


def begun(step: int, *in_flight: str, position: int = 0, **tries: int) -> JournalBegun:
    return JournalBegun(step, b"{}", JournalHead(StreamState(0, position), in_flight, 0, dict(tries)))


def stored(record: Record | Group) -> Stored:
    entry = GroupEntry(record) if isinstance(record, Group) else RecordEntry(record)
    data = entry.to_bytes()
    return Stored(RecordPlace(Path("nowhere"), 0, len(data)), data)


def after(*records: Record | Group, base: int = 0) -> JournalStanding:
    standing = JournalStanding(base)
    standing.follow(map(stored, records))
    return standing


def draw(index: int, version: int = 0) -> PromptDrawn:
    return PromptDrawn(f"0:{index}", version, 0, index + 1)


def group(index: int) -> Group:
    return Group(f"0:{index}", 0)


def test_finished_groups_are_on_hand_and_the_others_are_drawn_again() -> None:
    found = after(begun(4, "0:0", "0:1", position=2), draw(2), group(1), draw(3), group(3), base=4)
    assert list(found.ready) == ["0:1", "0:3"] and found.waiting == ("0:0", "0:2") and found.position == 4
    assert (found.steps, found.taken) == ([], None)


def test_a_step_is_done_when_it_was_trained_and_its_state_is_that_of_its_end() -> None:
    records = [begun(4), draw(0), draw(1), group(1), group(0), BatchTaken(5, ("0:0", "0:1"))]
    found = after(*records, base=4)
    assert found.taken is not None and [each.prompt_id for each in found.taken.groups] == ["0:0", "0:1"] and not found.steps
    found = after(*records, StepTrained(5, b"trained"), draw(2), base=4)
    assert found.taken is None and [(step.global_step, step.state) for step in found.steps] == [(5, b"trained")]
    found = after(*records, StepTrained(5, b"trained"), StepEnded(5, b"ended"), CheckpointKept(5), base=4)
    assert found.steps[0].state == b"ended" and found.waiting == () and not found.ready


def test_prompts_that_are_settled_for_good_do_not_return_and_others_do_behind_those_that_wait() -> None:
    found = after(
        begun(0), draw(0), draw(1), draw(2), draw(3), GroupSettled("0:0", "timed out", "late", True),
        GroupSettled("0:1", "equal rewards", "all 0", False, (0.0, 0.0)), GroupSettled("0:2", "too stale", "slow", True), draw(0), draw(4))
    assert found.waiting == ("0:2", "0:3", "0:0", "0:4")
    assert found.num_tries == {"0:0": 1, "0:2": 0} and found.num_flat_rejected == 1
    assert [(result.prompt_id, result.rewards) for result in found.results] == [("0:1", (0.0, 0.0))]
    assert after(begun(0, "0:9", **{"0:9": 3}), group(9)).num_tries == {}


def test_a_checkpoint_within_the_records_changes_nothing_but_the_count_of_what_is_in_flight() -> None:
    records = [
        begun(0), draw(0), draw(1), draw(2), group(0), group(1), BatchTaken(1, ("0:0", "0:1")), StepTrained(1, b"1"), draw(3), group(3)]
    found = after(*records, begun(1, "0:3", "0:2", position=4), group(3), draw(4))
    assert list(found.ready) == ["0:3"] and found.waiting == ("0:2", "0:4") and found.position == 5 and len(found.steps) == 1


def test_a_step_whose_process_was_killed_is_begun_anew_by_the_next_one_also_for_an_older_checkpoint() -> None:
    records = [
        begun(0), *map(draw, range(5)), *map(group, range(5)), BatchTaken(1, ("0:0", "0:1")), StepTrained(1, b"1"),
        BatchTaken(2, ("0:2", "0:3"))]
    found = after(*records, begun(1, position=5), *map(group, (2, 3, 4)), BatchTaken(2, ("0:2", "0:4")), StepTrained(2, b"2"))
    assert [[each.prompt_id for each in step.groups] for step in found.steps] == [["0:0", "0:1"], ["0:2", "0:4"]]
    assert list(found.ready) == ["0:3"] and found.taken is None


def test_answered_calls_are_those_of_groups_that_ran(tmp_path: Path) -> None:

    def heard(index: int, number: int, *tokens: int, start: int = 0, reason: str = "", version: int = 0) -> Stored:
        answer = HeardSample(np.array(tokens), np.array([-0.5] * len(tokens)), np.array([version] * len(tokens)), start, reason)
        data = CallEntry(f"0:{index}", version, number, b"key", (answer,)).to_bytes()
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        path.write_bytes(data)
        return Stored(RecordPlace(path, 0, len(data)), data)

    standing = JournalStanding(0)
    standing.follow([
        stored(begun(0)), *(stored(draw(each)) for each in range(5)), heard(0, 0, 5, 6), heard(0, 1, 7, reason="stop"),
        heard(0, 0, 8, 9, start=1, reason="length"), heard(1, 0, 5), heard(2, 0, 5), stored(group(1)),
        stored(GroupSettled("0:2", "timed out", "late", True)), heard(3, 0, 5), stored(draw(3, 1)), heard(3, 0, 6, version=1)])
    found = standing.read_open()
    assert {name: each.version for name, each in found.items()} == {"0:0": 0, "0:3": 1}
    [first, second] = found["0:0"].calls
    assert first.answers[0].tokens.tolist() == [5, 8, 9] and first.answers[0].finish_reason == "length" and second.key == b"key"
    assert found["0:3"].calls[0].answers[0].versions.tolist() == [1]
    standing.follow([stored(begun(0, "0:0")), heard(0, 0, 4)])
    assert [call.answers[0].tokens.tolist() for call in standing.read_open()["0:0"].calls] == [[4]] and len(standing.heard) == 1


def test_one_process_goes_back_to_the_step_that_all_have_done() -> None:
    found = after(
        begun(0), *map(draw, range(5)), *map(group, range(5)), BatchTaken(1, ("0:0", "0:1")), StepTrained(1, b"1"),
        BatchTaken(2, ("0:2", "0:3")), StepTrained(2, b"2"))
    found.back_to(1)
    assert found.taken is not None and [each.prompt_id for each in found.taken.groups] == ["0:2", "0:3"] and list(found.ready) == ["0:4"]
    found.back_to(0)
    assert found.taken.global_step == 1 and list(found.ready) == ["0:2", "0:3", "0:4"] and not found.steps


@pytest.mark.parametrize("records", [
    [begun(3)], [begun(0), BatchTaken(1, ("0:0",))], [begun(0), draw(0), group(0), BatchTaken(2, ("0:0",))],
    [begun(0), StepTrained(1, b"")]])
def test_records_that_do_not_follow_are_refused(records: list[Record | Group]) -> None:
    with pytest.raises(DataError, match="the journal"):
        after(*records)


def history(chance: random.Random) -> Iterator[tuple[Record | Group, dict[str, str]]]:
    """Records of a made-up run, each with what is true of every prompt after it."""
    states: dict[str, str] = {}
    waiting: list[int] = []
    step = position = 0
    yield begun(0), states
    for _ in range(120):
        running = [each for each, state in states.items() if state == "running"]
        ready = [each for each, state in states.items() if state == "ready"]
        event = chance.choice(["draw", "draw", "finish", "finish", "again", "reject", "step", "save"])
        if event == "draw":
            index = waiting.pop(0) if waiting else position
            position = max(position, index + 1)
            states[f"0:{index}"] = "running"
            yield PromptDrawn(f"0:{index}", step, 0, position), states
        elif event in ("finish", "again", "reject") and running:
            prompt_id = chance.choice(running)
            states[prompt_id] = {"finish": "ready", "again": "waiting", "reject": "rejected"}[event]
            if event == "again":
                waiting.append(int(prompt_id[2:]))
            yield Group(prompt_id, step) if event == "finish" else GroupSettled(prompt_id, "timed out", "", event == "again"), states
        elif event == "step" and len(ready) >= BATCH:
            step += 1
            states.update(dict.fromkeys(ready[:BATCH], "taken"))
            yield BatchTaken(step, tuple(ready[:BATCH])), states
            states.update(dict.fromkeys(ready[:BATCH], "trained"))
            yield StepTrained(step, b"{}"), states
        elif event == "save":
            in_flight = (*ready, *running)
            stream = StreamState(0, position, tuple(f"0:{each}" for each in waiting))
            yield JournalBegun(step, b"{}", JournalHead(stream, in_flight)), states


@pytest.mark.parametrize("seed", range(30))
def test_after_any_prefix_every_prompt_that_was_drawn_is_in_one_place(seed: int) -> None:
    standing = JournalStanding(0)
    for record, states in history(random.Random(seed)):
        standing.follow([stored(record)])
        taken = [each.prompt_id for each in standing.taken.groups] if standing.taken else []
        trained = [each.prompt_id for step in standing.steps for each in step.groups]
        places = {"taken": taken, "trained": trained, "ready": list(standing.ready), "waiting": list(standing.waiting)}
        expected = {name: sorted(each for each, state in states.items() if state == name) for name in ("taken", "trained", "ready")}
        expected["waiting"] = sorted(each for each, state in states.items() if state in ("waiting", "running"))
        assert {name: sorted(each) for name, each in places.items()} == expected
