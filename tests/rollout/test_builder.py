"""Trajectories from what workflows have at hand."""

import numpy as np
import pytest

from offbeat.data.reward import FailedReward
from offbeat.data.trajectory import TurnEnd
from offbeat.inference.sampling import Sample
from offbeat.rollout.builder import TrajectoryBuilder

FIRST = Sample((1, 3, 0), (-0.1, -0.2, -0.3), (4, 4, 5), "13", "stop", num_retries=1)
SECOND = Sample((2, 2), (-0.4, -0.5), (5, 6), "22", "length", num_retries=2)


def test_one_turn_marks_what_was_generated_and_by_which_version() -> None:
    trajectory = TrajectoryBuilder((3, 1, 9)).generated(FIRST).finish(0.5)
    assert trajectory.tokens.tolist() == [3, 1, 9, 1, 3, 0]
    assert trajectory.loss_mask.tolist() == [False, False, False, True, True, True]
    np.testing.assert_array_equal(trajectory.rollout_logprobs, np.array([0, 0, 0, -0.1, -0.2, -0.3], np.float32))
    assert trajectory.versions.tolist() == [-1, -1, -1, 4, 4, 5]
    assert (trajectory.reward, trajectory.reason, trajectory.head_version, trajectory.prompt_len) == (0.5, "stop", 4, 3)
    assert [trajectory.tokens.dtype, trajectory.rollout_logprobs.dtype, trajectory.versions.dtype] == [np.int32, np.float32, np.int32]
    assert (trajectory.episode, trajectory.agent, trajectory.turns, trajectory.num_retries) == (None, "", (), 1)


def test_several_turns_keep_the_tokens_of_each_and_what_it_earned() -> None:
    builder = TrajectoryBuilder((3, 1)).state("start").generated(FIRST).reward(0.25).reward(0.5).given([7, 7])
    assert (len(builder), builder.tokens) == (7, (3, 1, 1, 3, 0, 7, 7))
    trajectory = builder.generated(SECOND, order=4).finish({"right": 1.0}, episode=3, agent="white", malformed_calls=2)
    assert trajectory.tokens.tolist() == [3, 1, 1, 3, 0, 7, 7, 2, 2]
    assert trajectory.loss_mask.tolist() == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2
    assert trajectory.versions.tolist() == [-1, -1, 4, 4, 5, -1, -1, 5, 6]
    first, second = trajectory.turns
    assert (first.end, first.reward, first.order, second) == (5, 0.75, 0, TurnEnd(9, order=4))
    assert first.state and first.state == TrajectoryBuilder((9,)).state("start").generated(FIRST).finish(0.0).turns[0].state
    assert first.state != TrajectoryBuilder((9,)).state("end").generated(FIRST).finish(0.0).turns[0].state
    assert (trajectory.reason, trajectory.num_retries, trajectory.named_rewards) == ("length", 3, {"right": 1.0})
    assert (trajectory.episode, trajectory.agent, trajectory.malformed_calls) == (3, "white", 2)


def test_arrays_and_numbers_that_come_one_by_one_are_given_alike() -> None:
    given = [TrajectoryBuilder(ids).given(()).generated(SECOND).given(ids).tokens for ids in ((3, 1), np.array([3, 1], np.int32))]
    assert given[0] == given[1] == TrajectoryBuilder(iter((3, 1))).given(n for n in (2, 2, 3, 1)).tokens == (3, 1, 2, 2, 3, 1)
    assert all(type(token) is int for token in given[1]), "prompts are written as JSON"


def test_what_was_given_after_the_last_turn_and_a_reason_of_ones_own_stay() -> None:
    trajectory = TrajectoryBuilder((3,)).generated(SECOND).given((8,)).finish(0.0, reason="out of turns")
    assert (trajectory.tokens.tolist(), trajectory.row_tokens, trajectory.reason) == ([3, 2, 2, 8], 2, "out of turns")


def test_a_sample_without_tokens_is_a_trajectory_without_loss() -> None:
    trajectory = TrajectoryBuilder((3, 1)).generated(Sample((), (), (), "", "length")).finish(0.0)
    assert trajectory.tokens.tolist() == [3, 1]
    assert not trajectory.loss_mask.any()
    assert (trajectory.reason, trajectory.unusable) == ("length", None)


@pytest.mark.parametrize(("wrong", "why"), [
    (TrajectoryBuilder(("a",)).generated(FIRST).finish(1.0), "malformed: Trajectory.tokens must hold numbers"),  # pyright: ignore
    (TrajectoryBuilder(([3, 4], [5, 6])).generated(FIRST).finish(1.0), "malformed: Trajectory.tokens must hold numbers"),  # pyright: ignore
    (TrajectoryBuilder(([3], [5, 6])).generated(FIRST).finish(1.0), "malformed: Trajectory.tokens must hold numbers"),  # pyright: ignore
    (TrajectoryBuilder((3.5,)).generated(FIRST).finish(1.0), "malformed: Trajectory.tokens must hold numbers of type int32, got 3.5"),
    (TrajectoryBuilder((3, 2**31)).generated(FIRST).finish(1.0), "malformed: Trajectory.tokens must hold numbers of type int32, got 21474"),
    (TrajectoryBuilder((3, -2**63)).generated(FIRST).finish(1.0), "malformed: Trajectory.tokens must hold numbers of type int32, got -92"),
    (TrajectoryBuilder((3,)).generated(Sample((1, 2), (-0.1,), (4, 4), "", "stop")).finish(1.0), "malformed: Trajectory.rollout_logprobs"),
    (TrajectoryBuilder((3,)).generated(FIRST).finish(FailedReward("it hangs")), "reward failed: it hangs"),
    (TrajectoryBuilder((3,)).generated(FIRST).reward(FailedReward("no judge")).finish(1.0), "reward failed: turn 0: no judge"),
    (TrajectoryBuilder((3,)).generated(FIRST).finish(1.0, episode="one"), "malformed: Trajectory.episode must be"),  # pyright: ignore
])
def test_what_is_wrong_marks_the_trajectory_and_raises_nothing(wrong, why: str) -> None:
    assert wrong.reason.startswith(why), wrong.reason


def test_a_reward_of_a_turn_needs_a_turn() -> None:
    with pytest.raises(ValueError, match="call generated\\(\\) before reward\\(\\)"):
        TrajectoryBuilder((3,)).reward(1.0)
