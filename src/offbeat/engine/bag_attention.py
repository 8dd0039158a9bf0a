"""Attention of decode steps as weighted sums of rows, by torch's `embedding_bag`. Chosen by `fast_attention`, for the direct forward path.

A token has few query heads for each key head, so that a product of them with its cache is mostly overhead: batched products take twice as
long as reading keys and values does, and torch's fused kernel in bfloat16 four times. FBGEMM's kernels behind `embedding_bag` multiply
rows by numbers and add them up, about as fast as memory is read, and in float32. The scores of a query are such a sum: the cache stores
keys by columns, row d with number d of every position's key, and the query's numbers are the weights. The result is a sum of the positions'
rows of values, weighted by the scores.
"""

from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from offbeat.engine.batch_invariant import Attention, FastAttention, StepAttention
from offbeat.engine.cache import DecodeStep, add_mask


@dataclass(frozen=True, eq=False)
class Bags:
    """Indices and mask that all layers of a decode step share. Indices are int32.

    Attributes:
        mask: [B, 1, width] float32, 0 where the new token attends and -inf elsewhere.
        key_rows, key_bags: rows of the keys [B * num_kv_heads * head_dim, positions] for each query head, and where each head's begin.
        value_rows, value_bags: the same of the values [B * num_kv_heads * positions, head_dim].
    """

    mask: Tensor
    key_rows: Tensor
    key_bags: Tensor
    value_rows: Tensor
    value_bags: Tensor

    @classmethod
    def of(cls, step: DecodeStep, *, num_heads: int) -> "Bags":
        heads, sharing = step.rows * step.shape.num_kv_heads, num_heads // step.shape.num_kv_heads
        mask = add_mask(step.positions[:, None], width=step.width, window=None, dtype=torch.float32)
        keys, values = _rows(heads, sharing, step.head_dim, step.head_dim), _rows(heads, sharing, step.room, step.width)
        return cls(mask[:, None], *keys, *values)


@lru_cache(maxsize=2)  # of keys and values; they change when samples come or go, and once in `BUCKET` steps
def _rows(heads: int, sharing: int, stride: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the first `count` of each key head's `stride` rows for each of its `sharing` query heads, and where each of these begins."""
    first = torch.arange(0, heads * stride, stride, dtype=torch.int32)
    rows = (first[:, None] + torch.arange(count, dtype=torch.int32))[:, None].expand(-1, sharing, -1)
    return rows.reshape(-1), torch.arange(0, rows.numel(), count, dtype=torch.int32)


class BagAttention(FastAttention):
    """Attention of decode steps by `embedding_bag`, and of prompts as `FastAttention` computes it."""

    for_bags = True

    def of_step(self, step: DecodeStep, *, num_heads: int, scale: float) -> StepAttention:
        return partial(_attend, step, Bags.of(step, num_heads=num_heads), scale)


def _attend(step: DecodeStep, bags: Bags, scale: float, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    keys, values = step.store(layer, keys, values)
    columns = keys.transpose(2, 3).flatten(0, 2)
    if step.room > 2 * step.width:  # torch copies the part, which takes less than scores of all positions would
        columns = columns[:, : step.width]
    scores = weighted_sums(columns, bags.key_rows, bags.key_bags, queries.reshape(-1).float())
    scores = scores.view(step.rows, -1, columns.shape[1])[..., : step.width]
    weights = torch.softmax(torch.add(bags.mask, scores, alpha=scale), dim=-1)
    attended = weighted_sums(values.flatten(0, 2), bags.value_rows, bags.value_bags, weights.view(-1))
    return attended.view(step.rows, -1).to(queries.dtype)


def weighted_sums(table: Tensor, rows: Tensor, bags: Tensor, weights: Tensor) -> Tensor:
    """Add up rows of a table [N, S], each times its weight: [M, S] in the table's dtype, summed in float32.

    `rows` [K] are those of the first sum, then of the second; `bags` [M] is where each sum begins; `weights` [K] are as the table.
    """
    return torch.embedding_bag(table, rows, bags, False, 0, False, weights)[0]


def fast_attention(device: torch.device) -> Attention:
    """Return the fastest attention on a device: by bags on CPUs whose torch has FBGEMM."""
    return BagAttention() if device.type == "cpu" and "fbgemm" in torch.backends.quantized.supported_engines else FastAttention()
