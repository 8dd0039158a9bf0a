"""Attention of the direct forward path: as fast as torch computes it, or independent of the batch to the last bit.

Libraries cut the sums of a product in other ways where there are few rows, or many keys, so the numbers of a token depend, in their last
bits, on which other samples share its forward pass. `InvariantAttention` never meets these cases: a thread has at least four rows, which
`row_multiple` asks of the other products too, and a sum over keys goes on from one block of `KEYS` to the next. Then a token's numbers are
the same in every batch, whether it was decoded, or was prefilled alone, in parts, or after a known beginning. That this holds for the
processor at hand is checked before the engine serves.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from offbeat.engine.cache import BUCKET, DecodeStep, SlotCache, add_mask, attend
from offbeat.engine.forward import Forward, ordinary_tokens
from offbeat.model.attention import fused_attention

ROWS_PER_THREAD = 4
"""Fewest rows of a product for which MKL and oneDNN sum as they do for many rows. (Measured with AVX2, AVX-512 and AMX.)"""

TILE = 32
"""Tokens of a prompt whose attention is computed at once."""

KEYS = 128
"""Keys over which one product sums."""


StepAttention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Stores the keys and values of one new token per sample in a layer's cache, each [B, num_kv_heads, head_dim], and computes the attention
of its queries [B, num_heads, head_dim]: a function of the layer, queries, keys and values, that returns [B, num_heads * head_dim].
"""


class Attention(Protocol):
    """Computes attention over a cache.

    Attributes:
        row_multiple: the rows of every product are filled up to a multiple of this.
        for_bags: how the cache has to store keys and values; see `CacheShape`.
    """

    row_multiple: int
    for_bags: bool

    def of_step(self, step: DecodeStep, *, num_heads: int, scale: float) -> StepAttention:
        """Return the attention of a decode step; `scale` is the factor of the scores."""
        ...

    def attend_prompts(self, queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None, scale: float) -> Tensor:
        """Compute attention [N, num_heads, L, head_dim] of new tokens.

        Args:
            queries: [N, num_heads, L, head_dim].
            keys, values: [N, num_kv_heads, W, head_dim].
            mask: [N, 1, L, W], added to the scores; None is causal attention of W = L tokens.
        """
        ...


class FastAttention:
    """Attention as torch's own kernels compute it."""

    row_multiple = 1
    for_bags = False

    def of_step(self, step: DecodeStep, *, num_heads: int, scale: float) -> StepAttention:  # noqa: ARG002
        return partial(self._attend, step, scale)

    def _attend(self, step: DecodeStep, scale: float, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = step.extend(layer, keys, values)
        queries = queries.reshape(len(keys), -1, step.head_dim)
        return self.attend_decoding(queries, keys, values, mask=step.mask, scale=scale).reshape(step.rows, -1)

    def attend_decoding(self, queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor, scale: float) -> Tensor:
        """Compute attention of a few tokens, [B * num_kv_heads, G, head_dim]; see `cache.attend`."""
        return attend(queries, keys, values, mask=mask, scale=scale)

    def attend_prompts(self, queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None, scale: float) -> Tensor:
        return fused_attention(queries, keys, values, mask, scale=scale)


class InvariantAttention(FastAttention):
    """Attention in float32 on a CPU whose numbers for one token do not depend on the batch."""

    def __init__(self) -> None:
        self.row_multiple = ROWS_PER_THREAD * torch.get_num_threads()

    def attend_decoding(self, queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor, scale: float) -> Tensor:
        rows = queries.shape[1]
        queries = fill_rows(queries, self.row_multiple)
        weights = torch.softmax(torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale), dim=-1)
        result = torch.bmm(weights[:, :, :KEYS], values[:, :KEYS])
        for first in range(KEYS, keys.shape[1], KEYS):
            result = torch.baddbmm(result, weights[:, :, first : first + KEYS], values[:, first : first + KEYS])
        return result[:, :rows]

    def attend_prompts(self, queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None, scale: float) -> Tensor:
        num, num_kv_heads, width, head_dim = keys.shape
        length = queries.shape[2]
        grouped = queries.unflatten(1, (num_kv_heads, -1))
        if causal := mask is None:
            keys, values = (F.pad(part, (0, 0, 0, -width % BUCKET)) for part in (keys, values))
            mask = add_mask(torch.arange(length).view(1, 1, -1, 1), width=keys.shape[2], window=None, dtype=queries.dtype)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        tiles = []
        for first in range(0, length, TILE):
            tile = grouped[:, :, :, first : first + TILE]
            size = tile.shape[3]
            seen = first + TILE if causal else width  # later keys are hidden from every token of the tile
            hidden = mask[:, :, first : first + size, :seen].unsqueeze(2)
            hidden = hidden.expand(num, num_kv_heads, tile.shape[2], -1, -1).flatten(0, 1).flatten(1, 2)
            attended = self.attend_decoding(
                tile.flatten(0, 1).flatten(1, 2), keys[:, :seen], values[:, :seen], mask=fill_rows(hidden, self.row_multiple), scale=scale)
            tiles.append(attended.reshape(num, -1, size, head_dim))
        return torch.cat(tiles, dim=2)


def fill_rows(matrix: Tensor, multiple: int) -> Tensor:
    """Fill the rows of a matrix [..., N, I] up to a multiple with zeros; the matrix itself where none is missing."""
    missing = -matrix.shape[-2] % multiple
    return F.pad(matrix, (0, 0, 0, missing)) if missing else matrix


@torch.inference_mode()
def is_invariant(forward: Forward) -> bool:
    """Whether the logits of a token are the same bits whether it is decoded or prefilled, alone, in parts or beside others."""
    tokens = ordinary_tokens(forward.vocab_size).to(forward.device)
    stops = (1, 2, 7, len(tokens) - 3, len(tokens) - 2)
    whole = [_prefilled(forward, tokens[:stop].repeat(3, 1))[1] for stop in stops]
    cache = SlotCache(forward.cache_shape, device=forward.device, max_slots=1, max_positions=len(tokens))
    stepwise = []
    for start, stop in pairwise((0, *stops)):
        part = cache.prefill(np.zeros(1, np.int64), starts=np.array([start]), lengths=np.array([stop - start]))
        stepwise.append(forward.prefill(tokens[None, start:stop], part)[0])
    cache.prefill(np.zeros(1, np.int64), starts=np.array([0]), lengths=np.array([stops[-2]]))
    decoded = forward.decode(tokens[stops[-1] - 1 : stops[-1]], cache.step(np.array([stops[-1] - 1])))[0]
    return all(map(torch.equal, [*whole, whole[-1]], [*stepwise, decoded]))


def _prefilled(forward: Forward, prompts: Tensor) -> Tensor:
    """Return the logits [N, V] after prompts [N, L] int64, prefilled together."""
    num, length = prompts.shape
    cache = SlotCache(forward.cache_shape, device=forward.device, max_slots=num, max_positions=length)
    step = cache.prefill(np.arange(num), starts=np.zeros(num, np.int64), lengths=np.full(num, length))
    return forward.prefill(prompts, step)
