"""What a training step reports. Torch-free: the controller reads it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.telemetry.tracker import StatsPart, combine


@dataclass(frozen=True)
class StepStats:
    """Metrics of one training step over all ranks; equal on every rank.

    Attributes:
        metrics: name -> value.
            train/loss: sum over all tokens of loss weight times token loss.
            train/grad_norm: global norm before clipping, the mean over minibatches.
            train/lr: learning rate of the step.
            train/entropy: mean entropy over tokens trained on, in nats.
            train/tokens: tokens trained on.
            train/skipped_steps: minibatches whose update was left out: loss or gradient was not finite, or no token was trained on.
            Objectives that use a behaviour policy add, over the tokens trained on:
            train/clip_fraction: share whose gradient the clip removed.
            policy/ratio_mean: mean ratio of current to proximal policy.
            policy/logprob_gap_mean, policy/logprob_gap_max: |trainer's log-probability before the update - rollout_logprobs|.
            policy/kl_mean: estimated KL divergence of rollout to current policy, in nats.
            policy/behave_masked_fraction: share dropped for too large a ratio of proximal to behaviour policy.
            What has no token to be computed from is 0.
    """

    metrics: dict[str, float]


@dataclass(frozen=True)
class Update:
    """What all ranks together saw in one minibatch.

    Attributes:
        seen: statistics of the tokens, of all ranks.
        grad_norm: global norm before clipping.
    """

    seen: StatsPart
    grad_norm: float

    @property
    def is_sound(self) -> bool:
        """Whether the weights may be updated. Without tokens the gradient is zero and momentum alone would move them."""
        sums = self.seen.sums
        return sums["train/tokens"] > 0 and math.isfinite(sums["train/loss"]) and math.isfinite(self.grad_norm)


def merge(updates: Sequence[Update], *, lr: float) -> StepStats:
    """The report of a step from those of its minibatches."""
    seen = combine([update.seen for update in updates])
    return StepStats({
        **dict.fromkeys(seen.names, 0.0),
        **seen.values(),
        "train/grad_norm": sum(update.grad_norm for update in updates) / len(updates),
        "train/lr": lr,
        "train/skipped_steps": float(sum(not update.is_sound for update in updates)),
    })
