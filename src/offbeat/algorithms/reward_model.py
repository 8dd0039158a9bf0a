"""Batches and held-out metrics of a reward model. Numpy only; called by `controller.reward_model`, which has the ranks score them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offbeat.data.batch import Batch, LossSpec
from offbeat.data.pairs import EncodedPair
from offbeat.data.ranges import bounds


@dataclass(frozen=True)
class RewardEvaluation:
    """Held-out pairs under a reward model.

    Attributes:
        accuracy: share of pairs whose chosen answer has the higher reward.
        margin: mean of its lead over the rejected one.
        reward: mean over all answers.
    """

    accuracy: float
    margin: float
    reward: float

    def metrics(self) -> dict[str, float]:
        return {"eval/accuracy": self.accuracy, "eval/margin_mean": self.margin, "eval/reward_mean": self.reward}


def reward_batch(pairs: Sequence[EncodedPair], *, centring: float) -> Batch:
    """Make a batch whose loss is the mean over P pairs, each of a chosen answer, then a rejected one; `centring` is the loss's constant.

    It has 2 P sequences with one target each, at its last token, which weighs 1 / (2 P). Only its value is used; as a token to predict, a
    target is meaningless.
    """
    texts = [tokens for pair in pairs for tokens, _ in pair.sequences]
    offsets = bounds([len(text) for text in texts])
    tokens = np.concatenate([np.zeros(0, np.int32), *texts])
    ends = offsets[1:] - 1
    return Batch(
        tokens=tokens, offsets=offsets, positions=ends, targets=tokens[ends],
        columns={"loss_weights": np.full(len(texts), 1 / max(len(texts), 1)), "margins": np.repeat([pair.margin for pair in pairs], 2)},
        sequences={
            "group_ids": np.repeat(np.arange(len(pairs)), 2),
            "prefix_lens": np.repeat(np.array([pair.prefix_len for pair in pairs], np.int64), 2),
            "signs": np.array([1 if liked else -1 for pair in pairs for liked in pair.liked], np.int64)},
        losses=(LossSpec("bradley_terry", {"centring": centring}),), denominator=float(len(pairs)))


def compare_rewards(rewards: np.ndarray) -> RewardEvaluation:
    """Evaluate rewards of P >= 1 pairs, each of a chosen answer, then a rejected one: [P * 2], such as [0.9, 0.2] of one pair."""
    rewards_P2 = rewards.astype(np.float64).reshape(-1, 2)
    leads = rewards_P2[:, 0] - rewards_P2[:, 1]
    return RewardEvaluation(float((leads > 0).mean()), float(leads.mean()), float(rewards_P2.mean()))
