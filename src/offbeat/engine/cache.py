"""Keys and values of all running samples: two tensors of dense slots per layer, grown on demand. Used by both forward paths.

Where a model has experts, a further tensor holds the routes of every position, which grow, move and are kept with it.

It uses slots, not pages: at contexts of a few thousand tokens memory is not the limit, and a decode step reads plain views. Positions past
a sample's length hold finite leftovers, which the mask of `DecodeStep` hides and later tokens overwrite.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from offbeat.model.attention import window_mask
from offbeat.model.uploads import upload

BUCKET = 32
"""Attention reads positions in multiples of this."""

_SMALL_BYTES, _SHRINKS_BY = 64 << 20, 4
"""Size up to which a cache stays as it is, and the multiple of what is in use from which a larger one shrinks."""

SHRINKS_AFTER_S = 10.0
"""Seconds for which most of a cache is free before it shrinks: turns of agents have pauses between them, and new memory takes time."""


@dataclass(frozen=True)
class CacheShape:
    """Shape of the keys and values stored for one position of one sample, and of its `num_routes` ids of experts; 0 for a dense model.

    With `for_bags` it is stored as `bag_attention` reads it: in float32, and the positions of a key's number lie side by side.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    num_routes: int = 0
    route_dtype: torch.dtype = torch.uint8
    for_bags: bool = False

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.float32 if self.for_bags else self.dtype

    @property
    def bytes_per_token(self) -> int:
        keys = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.stored_dtype.itemsize
        return keys + self.num_routes * self.route_dtype.itemsize

    @property
    def parts(self) -> range:
        """Indices of the tensors: keys and values of the first layer, then of the others, and the last for routes."""
        return range(2 * self.num_layers + bool(self.num_routes))

    def sizes(self, part: int) -> tuple[tuple[int, int], torch.dtype]:
        """Return, for one position of a tensor, the numbers of heads and elements, such as (8, 64), and their type."""
        if part == 2 * self.num_layers:
            return (1, self.num_routes), self.route_dtype
        return (self.num_kv_heads, self.head_dim), self.stored_dtype

    def by_columns(self, part: int) -> bool:
        """Whether the positions of a tensor lie side by side."""
        return self.for_bags and part < 2 * self.num_layers and part % 2 == 0


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def _ample(needed: int, size: int, likely: int) -> int:
    """Return a size of at least `needed`; one that grows does so to what is likely, if that is at most twice the need, or else by half."""
    grown = likely if needed <= likely <= 2 * needed else max(needed, size * 3 // 2)
    return grown if needed > size else size


class SharingBound(Protocol):
    """Other memory under the bound of the slots."""

    def fit(self, slot_bytes: int) -> None:
        """Leave this many bytes to the slots, which are about to grow to them."""
        ...


class SlotCache:
    """Keys and values of all layers; per layer two tensors [slots, num_kv_heads, positions, head_dim].

    Attributes:
        max_tokens: largest product of slots and positions that the cache may hold, at least `BUCKET`.
        likely: slots and positions that may be needed soon; the cache grows to them at once where that is at most twice what it needs.
    """

    def __init__(
        self, shape: CacheShape, *, device: torch.device, max_slots: int, max_positions: int, max_bytes: int | None = None,
        beside: SharingBound | None = None,
    ) -> None:
        """`max_bytes` bounds the whole cache; with None only `max_slots` and `max_positions` bound it. `beside` shares the bound."""
        self.shape = shape
        self.device = device
        self.max_slots = max_slots
        self.max_positions = round_up(max_positions, BUCKET)
        most = self.max_slots * self.max_positions
        self.max_tokens = most if max_bytes is None else max(BUCKET, min(most, max_bytes // shape.bytes_per_token))
        self._beside = beside
        self.likely: tuple[int, int] = (0, 0)
        self._free_since_s: float | None = None  # when most of it was first seen to be free, if no more was needed since
        self.release()

    @property
    def slots(self) -> int:
        return self._data[0].shape[0]

    @property
    def positions(self) -> int:
        return self._data[0].shape[2]

    @property
    def size_bytes(self) -> int:
        return self.slots * self.positions * self.shape.bytes_per_token

    def reserve(self, *, slots: int, positions: int) -> None:
        """Make room for this many slots and positions, which must cover all in use; stored data is kept.

        Sizes grow to what is `likely`, or by half, so that copying stays a small share of all work, and no further than `max_tokens`
        allows. Tensors grow one after the other, so growth takes the extra memory of one of them.
        """
        if self._free_since_s is not None and not self._is_mostly_free(slots, positions):
            self._free_since_s = None
        if slots <= self.slots and positions <= self.positions:
            return
        slots, positions = self._room(slots, round_up(positions, BUCKET))
        if self._beside is not None:
            self._beside.fit(slots * positions * self.shape.bytes_per_token)
        for part, old in enumerate(self._data):
            self._data[part] = new = self._allocate(part, slots, positions)
            kept = (min(slots, old.shape[0]), min(positions, old.shape[2]))
            new[: kept[0], :, : kept[1]] = old[: kept[0], :, : kept[1]]

    def shrink(self, *, slots: int, positions: int, now_s: float) -> bool:
        """Free what is beyond this many slots and positions, which cover all in use, if that was most of a large cache for a while.

        They may be more than there are, as the newest token of a sample has no keys and values yet. `now_s` is a time of a monotonic clock.
        Returns whether anything was freed.
        """
        if not self._is_mostly_free(slots, positions):
            self._free_since_s = None
            return False
        self._free_since_s = now_s if self._free_since_s is None else self._free_since_s
        if now_s < self._free_since_s + SHRINKS_AFTER_S:
            return False
        self._free_since_s = None
        slots, positions = min(slots, self.slots), min(round_up(positions, BUCKET), self.positions)
        for part, old in enumerate(self._data):
            self._data[part] = new = self._allocate(part, slots, positions)
            new.copy_(old[:slots, :, :positions])
        return True

    @property
    def shrinks_at_s(self) -> float | None:
        """When `shrink` would free something, by its clock, if no more is needed until then; None if it would not."""
        return None if self._free_since_s is None else self._free_since_s + SHRINKS_AFTER_S

    def _is_mostly_free(self, slots: int, positions: int) -> bool:
        """Whether it is large, and what these slots and positions leave free is most of it."""
        used = min(slots, self.slots) * min(round_up(positions, BUCKET), self.positions)
        return self.size_bytes > max(_SMALL_BYTES, _SHRINKS_BY * used * self.shape.bytes_per_token)

    def _room(self, slots: int, positions: int) -> tuple[int, int]:
        """Choose sizes for at least this many slots and positions; the number of positions is a multiple of `BUCKET`."""
        assert slots <= self.max_slots and positions <= self.max_positions and slots * positions <= self.max_tokens, (
            "the scheduler admits no more than the cache may hold")
        ample_slots = min(_ample(slots, self.slots, self.likely[0]), self.max_slots)
        ample = min(round_up(_ample(positions, self.positions, self.likely[1]), BUCKET), self.max_positions)
        if ample_slots * ample <= self.max_tokens:
            return ample_slots, ample
        # There is no room to spare: shrink to the slots in use, and give them as many positions as fit.
        return slots, max(positions, min(ample, self.max_tokens // slots // BUCKET * BUCKET))

    def move(self, sources: list[int], targets: list[int], *, positions: int) -> None:
        """Copy the first `positions` of each source slot to its target slot."""
        if sources and self.slots:  # otherwise it was released, and nothing is stored
            to, where = upload(np.array(targets), self.device), upload(np.array(sources), self.device)
            for part in self._data:
                view = part[:, :, :positions]
                view[to] = view[where]

    def release(self) -> None:
        """Free the memory of all slots, and so all stored keys and values."""
        self._data = [self._allocate(part, 0, 0) for part in self.shape.parts]

    def clear(self, slots: list[int]) -> None:
        """Zero slots that may hold NaN or inf: attention multiplies masked positions by 0, which does not remove a NaN."""
        index = upload(np.array(slots), self.device)
        for part in self._data:
            part[index] = 0

    def blocks(self, part: int, size: int) -> Tensor:
        """View a tensor of B slots in blocks of `size` positions, which divides `BUCKET`: [B, num_kv_heads, blocks, size, head_dim].

        Routes are [B, 1, blocks, size, num_routes]. `CacheShape.parts` counts the tensors.
        """
        return self._data[part].unflatten(2, (-1, size))

    def step(self, lengths: np.ndarray) -> "DecodeStep":
        """Prepare one decode step of slots 0..B-1; `lengths` is [B] integer, the number of cached positions of each sample."""
        return DecodeStep(self, lengths)

    def prefill(self, slots: np.ndarray, *, starts: np.ndarray, lengths: np.ndarray) -> "PrefillStep":
        """Prepare a prefill of sequences, `slots`, `starts` and `lengths` [N] int64, each after the positions cached in its slot."""
        return PrefillStep(self, slots, starts=starts, lengths=lengths)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each [B, num_kv_heads, positions, head_dim] of all B slots; both are views."""
        return self._data[2 * layer], self._data[2 * layer + 1]

    def routes(self) -> Tensor:
        """Return the routes of all B slots, [B, positions, num_routes]; a view."""
        return self._data[2 * self.shape.num_layers][:, 0]

    def _allocate(self, part: int, slots: int, positions: int) -> Tensor:
        # Zeros instead of uninitialised memory: see `clear`.
        (heads, size), dtype = self.shape.sizes(part)
        if self.shape.by_columns(part):
            return torch.zeros((slots, heads, size, positions), dtype=dtype, device=self.device).transpose(2, 3)
        return torch.zeros((slots, heads, positions, size), dtype=dtype, device=self.device)


class PrefillStep:
    """New tokens of N sequences, each after the cached ones in its slot; values that all layers share are computed once.

    Attributes:
        positions: [N, L] int64, position of each token in its sequence; padding on the right repeats the last one.
        last: [N] int64, index of each sequence's last token among the L.
        width: number of positions that attention reads, a multiple of `BUCKET`.
        mask: the mask of layers without a window; see `window_mask`.
    """

    def __init__(self, cache: SlotCache, slots: np.ndarray, *, starts: np.ndarray, lengths: np.ndarray) -> None:
        """`slots`, `starts`, `lengths`: [N] int64, each sequence's slot and its numbers of cached and new tokens, e.g. [0], [64], [3]."""
        self._cache = cache
        self.head_dim = cache.shape.head_dim
        self._fresh = not starts.any()
        self._seen: Tensor | None = None
        self._length = int(lengths.max())
        self.width = round_up(int((starts + lengths).max()), BUCKET)
        cache.reserve(slots=int(slots.max()) + 1, positions=self.width)
        place = np.arange(self._length)
        self._slots = self._send(slots)
        self.positions = self._send(starts[:, None] + np.minimum(place, lengths[:, None] - 1))
        self.last = self._send(lengths - 1)
        if not self._fresh:
            sequence, token = np.nonzero(place < lengths[:, None])
            self._new = self._send(sequence), self._send(token)
            self._stored = self._send(slots[sequence]), self._send(starts[sequence] + token)
        self.mask = self.window_mask(None)

    def see(self, seen: np.ndarray) -> None:
        """Let each new token attend up to a position of its sequence, [N, L] int64, which may be a later one."""
        self._seen = self._send(seen)
        self.mask = self.window_mask(None)

    def _send(self, array: np.ndarray) -> Tensor:
        return upload(array, self._cache.device)

    def window_mask(self, window: int | None) -> Tensor | None:
        """Return a mask for the keys that `extend` returns, where a token attends to the last `window` positions; None is no bound.

        Returns:
            [N, 1, L, width] in the cache's dtype, 0 where a token attends and -inf elsewhere; [L, L] bool where nothing was cached before
            and no token sees later ones; None for plain causal attention.
        """
        if self._fresh and self._seen is None:
            return window_mask(self._length, window, self._cache.device)
        width, seen = self._length if self._fresh else self.width, None if self._seen is None else self._seen[:, None, :, None]
        return add_mask(self.positions[:, None, :, None], width=width, window=window, dtype=self._cache.shape.dtype, seen=seen)

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values, each [N, num_kv_heads, L, head_dim] in the cache's dtype.

        Returns:
            The keys and values to attend to: all that are cached of the sequences, each [N, num_kv_heads, width, head_dim], or the new
            ones alone where there are no others.
        """
        attended = []
        for stored, new in zip(self._cache.layer(layer), (keys, values), strict=True):
            self._store(stored, new)
            attended.append(new if self._fresh else stored[:, :, : self.width].index_select(0, self._slots).to(new.dtype))
        return attended[0], attended[1]

    def store_routes(self, routes: Tensor) -> None:
        """Store the routes of the new tokens, [N * L, num_routes] in the cache's type of routes."""
        self._store(self._cache.routes().unsqueeze(1), routes.view(len(self.positions), 1, self._length, -1))

    def _store(self, stored: Tensor, new: Tensor) -> None:
        """Copy [N, heads, L, size] to their places among [B, heads, positions, size]."""
        if self._fresh:
            stored[:, :, : self._length].index_copy_(0, self._slots, new.to(stored.dtype))
        else:
            (slot, position), (sequence, token) = self._stored, self._new
            stored[slot, :, position] = new[sequence, :, token].to(stored.dtype)


class DecodeStep:
    """One new position for each of the slots 0..B-1; values that all layers share are computed once.

    Attributes:
        positions: [B] int64, position of the new token, which equals the number of positions cached before it.
        width: number of positions that attention reads, a multiple of `BUCKET`.
        room: number of positions that each slot of the cache has.
    """

    def __init__(self, cache: SlotCache, lengths: np.ndarray) -> None:
        self._cache = cache
        self.shape = cache.shape
        self.rows = len(lengths)
        self.head_dim = cache.shape.head_dim
        self.width = round_up(int(lengths.max()) + 1, BUCKET)
        cache.reserve(slots=self.rows, positions=self.width)
        self.room = cache.positions
        self.positions = upload(lengths.astype(np.int64), cache.device)
        self._slots = torch.arange(self.rows, device=cache.device)

    @cached_property
    def mask(self) -> Tensor:
        """[B * num_kv_heads, 1, width] in the cache's dtype, 0 where the new token attends and -inf elsewhere."""
        return self.window_mask(None)

    def window_mask(self, window: int | None) -> Tensor:
        """Return `mask` [B * num_kv_heads, 1, width] with all but the last `window` positions hidden as well; None hides no more."""
        mask = add_mask(self.positions[:, None], width=self.width, window=window, dtype=self.shape.dtype)
        return mask.repeat_interleave(self.shape.num_kv_heads, dim=0).unsqueeze(1)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new position's keys and values, each [B, num_kv_heads, head_dim] in the cache's dtype.

        Returns views of all cached ones of the slots, each [B, num_kv_heads, positions, head_dim].
        """
        cached = []
        for stored, new in zip(self._cache.layer(layer), (keys, values), strict=True):
            stored[self._slots, :, self.positions] = new.to(stored.dtype)
            cached.append(stored[: self.rows])
        return cached[0], cached[1]

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Do as `store`; returns those that attention reads, each [B * num_kv_heads, width, head_dim]."""
        keys, values = self.store(layer, keys, values)
        return keys[:, :, : self.width].flatten(0, 1), values[:, :, : self.width].flatten(0, 1)

    def store_routes(self, routes: Tensor) -> None:
        """Store the new position's routes, [B, num_routes] in the cache's type of routes."""
        self._cache.routes()[self._slots, self.positions] = routes


def add_mask(positions: Tensor, *, width: int, window: int | None, dtype: torch.dtype, seen: Tensor | None = None) -> Tensor:
    """Build a mask [N, 1, L, width] or [B, width] of tokens at `positions`, [N, 1, L, 1] or [B, 1].

    It is 0 where they attend, -inf after them, or after `seen`, of the form of `positions`, and before their window.
    """
    position = torch.arange(width, device=positions.device)
    hidden = position > (positions if seen is None else seen)
    if window is not None:
        hidden |= position <= positions - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def attend(queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor, scale: float) -> Tensor:
    """Compute attention [B * num_kv_heads, G, head_dim] of one new token per sample over the cache.

    In half precision this uses torch's own kernels, one launch, which keep scores in float32 as a full forward does.

    Args:
        queries: [B * num_kv_heads, G, head_dim] in the cache's dtype, G query heads per key head.
        keys, values: [B * num_kv_heads, width, head_dim].
        mask: [B * num_kv_heads, 1, width], added to the scores.
    """
    if queries.dtype.itemsize < 4:
        parts = (queries.unsqueeze(1), keys.unsqueeze(1), values.unsqueeze(1))
        return F.scaled_dot_product_attention(*parts, attn_mask=mask.unsqueeze(1), scale=scale).squeeze(1)
    return attend_by_products(queries, keys, values, mask=mask, scale=scale)


def attend_by_products(queries: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor, scale: float) -> Tensor:
    """Compute `attend`, [B * num_kv_heads, G, head_dim], by batched matrix products over (sample, key head).

    In float32 they match or beat `scaled_dot_product_attention`, whose set-up costs more than its tiling saves for a single query.
    """
    scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale)
    return torch.bmm(torch.softmax(scores, dim=-1), values)
