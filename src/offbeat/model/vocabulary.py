"""The part of a vocabulary whose logits one rank computes, and how the ranks' parts of a log-softmax are joined.

Called by `head`. A rank of a tensor group holds the head's weight for a slice of the vocabulary, [V / ranks, H], so that no rank ever holds
or sends logits of the others: two sums and a maximum for each position, and a logit for each pick, are all that ranks exchange.
"""

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokens `start` to `stop` - 1 are computed here, and the rest by the other ranks of `group`; all of them where that is None."""

    start: int
    stop: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Return the part that a head's weight [V, H] has here; a DTensor must be on a mesh of one dimension."""
        if not isinstance(weight, DTensor) or not weight.placements[0].is_shard(0):
            return cls(0, len(weight))
        (count, *_), (start, *_) = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        return cls(start, start + count, weight.device_mesh.get_group())

    def own(self, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the columns [M] int64 of tokens, and [M] bool for tokens of other parts, whose column is any; None if undivided."""
        if self.group is None:
            return targets, None
        return (targets - self.start).clamp(0, self.stop - self.start - 1), (targets < self.start) | (targets >= self.stop)

    def join(self, normalizer: Tensor, means: Tensor, picked: Tensor) -> None:
        """Turn numbers of this part into numbers of the whole vocabulary, in place; collective.

        Args:
            normalizer: [U] float32, log of the sum of exponentials.
            means: [U] float32, mean logit under the softmax; [0] if it is not wanted.
            picked: [M] float32, picked logits; 0 for tokens of other parts.
        """
        if self.group is None:
            return
        largest = normalizer.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        shares = (normalizer - largest).exp_()
        sums = torch.cat([shares, shares * means if len(means) else means, picked])
        dist.all_reduce(sums, group=self.group)
        total, weighted, logits = sums.split([len(shares), len(means), len(picked)])
        normalizer.copy_(largest + total.log())
        if len(means):
            means.copy_(weighted / total)
        picked.copy_(logits)

    def sum(self, gradient: Tensor | None) -> Tensor | None:
        """Sum the gradient of the shared input [U, H] over all parts, in place; collective."""
        if self.group is not None and gradient is not None:
            dist.all_reduce(gradient, group=self.group)
        return gradient
