"""Records of a journal: each comes back as it was, and a group with every array, reward and reason."""

import math

import numpy as np
import pytest

from offbeat.data.curriculum import CurriculumState
from offbeat.data.reward import FailedReward, NamedReward
from offbeat.data.stream import StreamState
from offbeat.data.trajectory import DTYPES, Group, Trajectory, TurnEnd, failed_trajectory
from offbeat.errors import DataError
from offbeat.journal.records import (
    BatchTaken,
    CheckpointKept,
    GroupEntry,
    GroupFinished,
    GroupSettled,
    JournalBegun,
    JournalHead,
    PromptDrawn,
    Record,
    RecordEntry,
    StepEnded,
    StepTrained,
    decode_record,
    pack,
    unpack,
)


def trajectory(episode: int, *rewards: float) -> Trajectory:
    return Trajectory(
        np.array([3, 1, 9, 1, 3, 0]), np.array([0, 0, 0, 1, 1, 1], bool), np.array([0, 0, 0, -0.1, -0.2, -0.3], np.float32),
        np.array([-1, -1, -1, 4, 4, 5]), rewards[0], "stop", 2, episode=episode, agent="solver",
        turns=tuple(TurnEnd(4 + index, reward, "state", index) for index, reward in enumerate(rewards[1:])), malformed_calls=1)


GROUP = Group("0:17", 3, (
    trajectory(3, 1.0), trajectory(4, NamedReward({"right": 0.5, "short": 0.25})), trajectory(5, FailedReward("it hung")),
    trajectory(6, 0.0, 0.5, 0.0, 0.25), failed_trajectory("the agent died", episode=2)), metrics={"won": 1.0})


@pytest.mark.parametrize("record", [
    JournalBegun(7, b"{}", JournalHead(StreamState(1, 5, ("0:3",), CurriculumState({3: 0.25}, (4,))), ("1:2",), 3, {"1:2": 1})),
    PromptDrawn("0:17", 3, 0, 12), GroupFinished("0:17", b"bytes"), GroupSettled("0:17", "timed out", "late", True, (0.5,)),
    BatchTaken(8, ("0:17", "0:3")), StepTrained(8, b'{"a": 1}'), StepEnded(8, b"{}"), CheckpointKept(8)])
def test_every_record_comes_back_as_it_was(record: Record) -> None:
    assert decode_record(RecordEntry(record).to_bytes()) == record


def test_a_group_comes_back_with_all_that_training_reads() -> None:
    assert [t.num_generated for t in GROUP.usable]  # values that were computed before do not get into the record
    entry = GroupEntry(GROUP)
    record = decode_record(entry.to_bytes())
    assert isinstance(record, GroupFinished)
    group = unpack(record.packed)
    assert (group.prompt_id, group.admitted_version, group.rejected, group.metrics) == ("0:17", 3, None, {"won": 1.0})
    assert len(group.trajectories) == 5 and entry.num_bytes > 0
    for own, was in zip(group.trajectories, GROUP.trajectories, strict=True):
        for name, dtype in DTYPES.items():
            assert getattr(own, name).dtype == dtype and np.array_equal(getattr(own, name), getattr(was, name))
        for name in ("reason", "num_retries", "named_rewards", "episode", "agent", "turns", "malformed_calls", "unusable"):
            assert getattr(own, name) == getattr(was, name), name
        assert own.reward == was.reward or (math.isnan(own.reward) and math.isnan(was.reward))
    assert np.array_equal(group.rewards, GROUP.rewards)
    assert pack(group) == pack(GROUP)


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x01not a record"])
def test_other_bytes_are_no_record(data: bytes) -> None:
    with pytest.raises(DataError):
        decode_record(data)
