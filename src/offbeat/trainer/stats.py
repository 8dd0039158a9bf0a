"""The metrics that a training step reports. Torch-free: the controller reads it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.telemetry.tracker import StatsPart, combine


@dataclass(frozen=True)
class Update:
    """Statistics of one minibatch over all ranks.

    Attributes:
        seen: statistics of the targets.
        grad_norm: global norm before clipping.
    """

    seen: StatsPart
    grad_norm: float

    @property
    def is_sound(self) -> bool:
        """Whether the weights may be updated. Without tokens the gradient is zero and momentum alone would move them."""
        sums = self.seen.sums
        return sums["train/tokens"] > 0 and math.isfinite(sums["train/loss"]) and math.isfinite(self.grad_norm)


def merge(updates: Sequence[Update], *, lr: float) -> dict[str, float]:
    """Merge the statistics of a step's minibatches into its metrics; equal on every rank.

    Returns:
        By name:
        train/loss: sum over all targets of loss weight times loss.
        train/grad_norm: global norm before clipping, averaged over minibatches.
        train/lr: learning rate of the step.
        train/entropy: mean entropy over the targets, in nats.
        train/tokens: number of targets.
        train/skipped_steps: number of minibatches whose update was skipped: loss or gradient was not finite, or there was no target.
        Losses that use a behaviour policy add, over the targets:
        train/clip_fraction: share of targets whose gradient the clip removed.
        policy/ratio_mean: mean ratio of current to proximal policy.
        policy/logprob_gap_mean, policy/logprob_gap_max: |trainer's log-probability before the update - rollout_logprobs|.
        policy/kl_mean: estimated KL divergence of rollout to current policy, in nats.
        policy/behave_masked_fraction: share of targets dropped because the ratio of proximal to behaviour policy was too large.
        A metric without any target is 0.
    """
    seen = combine([update.seen for update in updates])
    return {
        **dict.fromkeys(seen.names, 0.0),
        **seen.values(),
        "train/grad_norm": sum(update.grad_norm for update in updates) / len(updates),
        "train/lr": lr,
        "train/skipped_steps": float(sum(not update.is_sound for update in updates)),
    }
