"""The targets of one loss as tensors, which weights, objectives and regularisers read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Targets:
    """M targets of one loss.

    Attributes:
        logprobs: [M] float32 under the current policy, with gradient; of a value model, its values.
        prox, rollout: [M] float32, under the policy at the start of the step and the one that sampled. Where the batch lacks a column, the
            current log-probabilities stand in.
        anchor: [M] float32, under the policy to which the ratio compares the current one.
        advantages: [M] float32; 1 where the loss reads none.
        counted: [M] bool, the loss tokens over which values of a sequence are taken.
        sequences: [M] int64, ascending from 0, the sequence of each target; empty for losses that do not need it.
        columns: [M] float32 each, by name: all columns of the batch that the loss reads.
        groups: [M] int64 from 0, the group of each target; empty for losses that do not compare the sequences of a group.
        num_sequences, num_groups: how many different ones are in `sequences` and `groups`; numbers of the host, which need not wait to
            read them from the device.
        liked: [M] bool, whether the target's answer was chosen or labelled as good; empty as `groups`.
        reference: [M] float32, under the reference policy; empty for losses that do not read it.
    """

    logprobs: Tensor
    prox: Tensor
    rollout: Tensor
    anchor: Tensor
    advantages: Tensor
    counted: Tensor
    sequences: Tensor
    constants: Mapping[str, Any]
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    num_sequences: int = 0
    groups: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    num_groups: int = 0
    liked: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    reference: Tensor = field(default_factory=lambda: torch.zeros(0))

    def over_sequences(self, values: Tensor, how: Literal["mean", "sum", "max"]) -> Tensor:
        """Return [M]: for each target, the mean, sum or maximum of `values` [M] over the counted targets of its sequence, or 0 of none.

        For example values [1, 3, 5] of sequences [0, 0, 1] have the means [2, 2, 5] if all targets count.
        """
        zeros = values.new_zeros(self.num_sequences)
        if how == "max":
            chosen = torch.where(self.counted, values, -torch.inf)
            largest = zeros.scatter_reduce(0, self.sequences, chosen, "amax", include_self=False)
            return largest.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=0.0)[self.sequences]
        sums = zeros.index_add(0, self.sequences, only(self.counted, values))
        if how == "mean":
            counts = zeros.index_add(0, self.sequences, self.counted.to(values.dtype))
            sums = sums / counts.clamp(min=1)
        return sums[self.sequences]


def only(condition: Tensor, values: Tensor) -> Tensor:
    """Return the values [M] where the condition holds, else 0 without gradient, even where a value is not finite."""
    return torch.where(condition, values, 0.0)
