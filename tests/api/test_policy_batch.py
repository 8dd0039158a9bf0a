"""Sampled answers become a batch with the loss that clients of the service have."""

import numpy as np
import pytest

import offbeat
from offbeat.algorithms.objectives import client_loss
from offbeat.errors import DataError

ANSWERS = [
    offbeat.Sample([7, 3], [-0.5, -0.25], [1, 1], "73", "stop"), offbeat.Sample([4], [-1.0], [1], "4", "stop"),
    offbeat.Sample([8, 8, 1], [-2.0, -3.0, -0.5], [1, 1, 1], "881", "length")]
PROMPTS = [[5, 9], [5, 9], [6]]


def test_each_token_of_an_answer_is_a_target_with_its_advantage() -> None:
    batch = offbeat.policy_batch(PROMPTS, ANSWERS, [1.5, -0.5, 0.0], loss="ppo", clip_high=1.28)
    assert batch.losses == (client_loss("ppo", clip_high=1.28),)
    assert batch.tokens.tolist() == [5, 9, 7, 3, 5, 9, 4, 6, 8, 8, 1]
    assert batch.targets.tolist() == [7, 3, 4, 8, 8, 1] and batch.positions.tolist() == [1, 2, 5, 7, 8, 9]
    assert batch.columns["advantages"].tolist() == [1.5, 1.5, -0.5, 0.0, 0.0, 0.0]
    assert batch.columns["rollout_logprobs"].tolist() == [-0.5, -0.25, -1.0, -2.0, -3.0, -0.5]
    np.testing.assert_allclose(batch.columns["loss_weights"], np.full(6, 1 / 6), rtol=1e-6)
    assert (batch.group_ids.tolist(), batch.prefix_lens.tolist()) == ([0, 0, 1], [2, 2, 1])


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo", "importance_sampling", "dro"])
def test_all_losses_of_clients_that_read_advantages_can_be_chosen(loss: str) -> None:
    assert offbeat.policy_batch(PROMPTS, ANSWERS, [1.0, 1.0, 1.0], loss=loss).losses[0].name == loss


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match="as many prompts and advantages as answers, got 2 prompts, 3 answers and 3 advantages"):
        offbeat.policy_batch(PROMPTS[:2], ANSWERS, [1.0, 1.0, 1.0])
    with pytest.raises(DataError, match="reads advantages, got 'cross_entropy'; use sft_batch"):
        offbeat.policy_batch(PROMPTS, ANSWERS, [1.0, 1.0, 1.0], loss="cross_entropy")
    with pytest.raises(DataError, match="no loss 'grpo'"):
        offbeat.policy_batch(PROMPTS, ANSWERS, [1.0, 1.0, 1.0], loss="grpo")
