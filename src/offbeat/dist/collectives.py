"""Scalars of all ranks become one: called by the trainer once per optimizer step, always on `cpu_group`.

All ranks must give the same keys. One collective carries all values in the sorted order of their keys, in float64, so that every rank
gets the same bits.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist


def sum_scalars(values: Mapping[str, float], group: dist.ProcessGroup) -> dict[str, float]:
    """Sum each value over the ranks of `group`."""
    return _reduce(values, dist.ReduceOp.SUM, group)


def max_scalars(values: Mapping[str, float], group: dist.ProcessGroup) -> dict[str, float]:
    """Take each value's maximum over the ranks of `group`."""
    return _reduce(values, dist.ReduceOp.MAX, group)


def _reduce(values: Mapping[str, float], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> dict[str, float]:
    keys = sorted(values)
    packed = torch.tensor([values[key] for key in keys], dtype=torch.float64)
    dist.all_reduce(packed, op=op, group=group)
    return dict(zip(keys, packed.tolist(), strict=True))
