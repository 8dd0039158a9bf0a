"""What a workflow gives back."""

import numpy as np

from offbeat.inference.sampling import Sample
from offbeat.rollout.episode import single_turn_trajectory


def test_a_trajectory_marks_what_was_generated_and_by_which_version() -> None:
    trajectory = single_turn_trajectory((3, 1, 9), Sample((1, 3, 0), (-0.1, -0.2, -0.3), (4, 4, 5), "13", "stop"), 0.5)
    assert trajectory.tokens.tolist() == [3, 1, 9, 1, 3, 0]
    assert trajectory.loss_mask.tolist() == [False, False, False, True, True, True]
    np.testing.assert_array_equal(trajectory.rollout_logprobs, np.array([0, 0, 0, -0.1, -0.2, -0.3], np.float32))
    assert trajectory.versions.tolist() == [-1, -1, -1, 4, 4, 5]
    assert (trajectory.reward, trajectory.reason, trajectory.head_version, trajectory.prompt_len) == (0.5, "stop", 4, 3)
    assert [trajectory.tokens.dtype, trajectory.rollout_logprobs.dtype, trajectory.versions.dtype] == [np.int32, np.float32, np.int32]


def test_a_sample_without_tokens_is_a_trajectory_without_loss() -> None:
    trajectory = single_turn_trajectory((3, 1), Sample((), (), (), "", "length"), 0.0)
    assert trajectory.tokens.tolist() == [3, 1]
    assert not trajectory.loss_mask.any()
    assert trajectory.reason == "length"
