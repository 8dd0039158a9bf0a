"""The metrics that a training step reports. Torch-free: the controller reads it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from offbeat.telemetry.tracker import StatsPart, combine


@dataclass(frozen=True)
class Update:
    """Statistics of one minibatch over all ranks.

    Attributes:
        grad_norm: global norm before clipping.
        routers: metrics of the routers, and of their load-balancing loss; empty for a dense model.
    """

    seen: StatsPart
    grad_norm: float
    routers: dict[str, float] = field(default_factory=dict)

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
        Losses over samples of a policy add, over the targets:
        train/clip_fraction: share of targets whose gradient the clip removed; for cispo, whose weight was bounded.
        train/clip_low_fraction, train/clip_high_fraction: the same at the lower bound (of the ratio, or of the move down) and at the upper
            one; the dual clip counts in neither.
        policy/ratio_mean, policy/ratio_min, policy/ratio_max: ratio of current policy to the loss's anchor.
        policy/logprob_gap_mean, policy/logprob_gap_max: |trainer's log-probability before the update - rollout_logprobs|.
        policy/kl_mean: estimated KL divergence of rollout to current policy, in nats; the same as the next k3.
        policy/kl_rollout_to_current_k1_mean, policy/kl_rollout_to_current_k3_mean: estimates of KL(rollout || current).
        policy/kl_rollout_to_prox_k3_mean: estimate of KL(rollout || policy before the update).
        policy/kl_current_to_ref_k1_mean, policy/kl_current_to_ref_k3_mean: estimates of KL(current || reference), if the loss reads it.
        policy/behave_masked_fraction: share of targets dropped because the ratio of proximal to behaviour policy was out of bounds, or
            because there was no rollout log-probability to compare with.
        policy/NAME_masked_fraction: share of targets that the filter of that metric drops, such as policy/k3_masked_fraction.
        policy/masked_fraction: share of targets dropped for any of these reasons.
        policy/weight_mean, policy/weight_max: constant weight of the targets: behaviour weight times filters.
        policy/weight_ess: effective sample size of that weight W as a share of the targets, (sum W)^2 / (n sum W^2); 1 if all are equal.
        own/NAME: metrics that an objective of the user's own returns; a target that it does not see has 0.
        policy/gate_mean: share of the gradient that sapo's gate lets through.
        The loss of a critic adds, over the targets, with values as they are before each update:
        critic/value_mean, critic/return_mean: mean value and mean return.
        critic/explained_variance: 1 - Var(return - value) / Var(return); 0 if all returns are equal.
        critic/clip_fraction: share of values that have moved further than the clip.
        Losses of preference pairs add, over the pairs (over the answers, for kto):
        preference/accuracy: share of pairs whose chosen answer is the better one, as the loss measures it, before the update.
        preference/margin_mean: mean margin: the argument of the loss's sigmoid without gamma, or for ipo the difference itself.
        preference/chosen_logratio_mean, preference/rejected_logratio_mean: log-probability minus the reference's, summed over an
            answer; for ipo, its mean over an answer's tokens. Simpo has chosen_logprob_mean and rejected_logprob_mean by token instead.
        The loss of a reward model adds, over the pairs, with rewards as they are before the update:
        reward_model/accuracy: share of pairs whose chosen answer has the higher reward.
        reward_model/margin_mean, reward_model/reward_mean: mean lead of the chosen answer, and mean reward of all answers.
        A mixture of experts adds, over the tokens of the rows and averaged over minibatches, before the update:
        router/load_imbalance: load of a layer's busiest expert by the mean load of its experts, averaged over layers; 1 is even.
        router/unused_fraction: share of the experts, of all layers, that no token used.
        router/entropy: entropy of the softmax of a router's logits, in nats, averaged over tokens and layers; log E is even.
        router/replay_agreement: with model.route_replay, share of the replayed experts that the trainer's routers would choose, too.
        router/aux_loss: the load-balancing loss, if it is trained on, without its coefficient; the number of experts that a token is sent
            to, if all are used evenly. With it, load_imbalance counts a shared prompt once for each of its samples.
        A metric without any target is 0.
    """
    seen = combine([update.seen for update in updates])
    return {
        **_finished(dict.fromkeys(seen.names, 0.0) | seen.values()),
        **{name: sum(update.routers[name] for update in updates) / len(updates) for name in updates[0].routers},
        "train/grad_norm": sum(update.grad_norm for update in updates) / len(updates),
        "train/lr": lr,
        "train/skipped_steps": float(sum(not update.is_sound for update in updates)),
    }


def _finished(metrics: dict[str, float]) -> dict[str, float]:
    """Replace means of squares by the metrics that need them, such as "policy/weight_ess"."""
    if "policy/weight_square_mean" in metrics:
        mean_square = metrics.pop("policy/weight_square_mean")
        metrics["policy/weight_ess"] = metrics["policy/weight_mean"] ** 2 / mean_square if mean_square else 0.0
    if "critic/error_mean" in metrics:
        unexplained = metrics.pop("critic/error_square_mean") - metrics.pop("critic/error_mean") ** 2
        variance = metrics.pop("critic/return_square_mean") - metrics["critic/return_mean"] ** 2
        metrics["critic/explained_variance"] = 1 - max(unexplained, 0.0) / variance if variance > 0 else 0.0
    return metrics
