"""Trajectories and groups."""

import numpy as np
import pytest

from offbeat.data import wire
from offbeat.data.trajectory import Group, Trajectory
from offbeat.errors import DataError

ONE = Trajectory(
    np.array([3, 1, 9, 1, 3, 0]), np.array([0, 0, 0, 1, 1, 1]), np.array([0, 0, 0, -0.1, -0.2, -0.1]), np.array([-1, -1, -1, 4, 4, 5]), 1.0)
EMPTY = Trajectory(np.array([3]), np.array([0]), np.zeros(1), np.array([-1]), 0.0, "length")


def test_a_trajectory_knows_its_prompt_and_its_oldest_version() -> None:
    assert (len(ONE), ONE.prompt_len, ONE.head_version) == (6, 3, 4)
    assert (len(EMPTY), EMPTY.prompt_len, EMPTY.head_version) == (1, 1, -1)
    assert [getattr(ONE, name).dtype for name in ("tokens", "loss_mask", "rollout_logprobs", "versions")] == [
        np.int32, np.bool_, np.float32, np.int32]


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(DataError, match=r"Trajectory.versions must have shape \(1,\) like tokens, got \(2,\)"):
        Trajectory(np.array([3]), np.array([0]), np.zeros(1), np.array([-1, 4]), 0.0)


def test_a_group_adds_up_its_trajectories() -> None:
    group = Group("0:7", 3, (ONE, EMPTY))
    assert (group.num_tokens, group.head_version, group.rewards.tolist()) == (7, 4, [1.0, 0.0])
    assert Group("0:7", 3, (EMPTY,)).head_version == 3
    assert Group("0:7", 3, rejected="late").head_version == 3


@pytest.mark.parametrize(("encode", "decode"), [(wire.encode, wire.decode), (wire.encode_json, wire.decode_json)])
def test_a_group_survives_bytes_and_json(encode, decode) -> None:
    group = Group("0:7", 3, (ONE, EMPTY), metrics={"turns": 2.0})
    back = decode(Group, encode(group))
    assert (back.prompt_id, back.admitted_version, back.rejected, back.metrics) == ("0:7", 3, None, {"turns": 2.0})
    for sent, got in zip(group.trajectories, back.trajectories, strict=True):
        assert (got.reward, got.reason) == (sent.reward, sent.reason)
        for name in ("tokens", "loss_mask", "rollout_logprobs", "versions"):
            assert getattr(got, name).dtype == getattr(sent, name).dtype
            np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
