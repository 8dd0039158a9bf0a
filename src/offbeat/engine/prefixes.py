"""Keys and values of earlier prompts and answers, so that a prompt with the same beginning computes only its rest.

Used by `runner`. They are cut into blocks of tokens, which form a tree: a block belongs to the weights that computed it, and follows one
other block. The least recently used blocks make room for others. A change of the weights empties the cache: no block is ever stale.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from offbeat.engine.cache import BUCKET, CacheShape, SlotCache
from offbeat.model.peft_io import Adapter
from offbeat.model.uploads import upload

BLOCK = 16
"""Tokens in a block. Two prompts share a multiple of this, such as 32 of 40 equal tokens."""

assert BUCKET % BLOCK == 0, "the cache's positions are cut into whole blocks"

SHARE = 0.125
"""Largest share of the cache's bound that is kept of samples that have ended."""

FIRST_BLOCKS = 64
"""Number of blocks for which there is room at first; it doubles as needed."""

BlockKey = tuple[int, bytes]
"""A block's identity: the number of the block before it, or of the weights, and its tokens."""


@dataclass(frozen=True)
class Begun:
    """The known beginning of a prompt.

    Attributes:
        blocks: numbers of the blocks that hold its beginning.
        next: the block that would follow; None where the rest is shorter than a block, or could not be kept.
    """

    blocks: tuple[int, ...]
    next: BlockKey | None

    @property
    def num_tokens(self) -> int:
        return len(self.blocks) * BLOCK


class PrefixCache:
    """Blocks of keys and values, per layer two tensors [blocks, num_kv_heads, BLOCK, head_dim], and the tree that finds them.

    Routes lie beside them, if the cache has any, in a last tensor [blocks, 1, BLOCK, num_routes]. `fit` sets `max_blocks`.
    """

    def __init__(self, shape: CacheShape, *, device: torch.device, max_bytes: int) -> None:
        """`max_bytes` bounds this and the slots together; `SHARE` of it bounds this alone."""
        self._shape = shape
        self._device = device
        self._max_bytes = max_bytes
        self._block_bytes = shape.bytes_per_token * BLOCK
        self._roots: WeakKeyDictionary[Adapter, int] = WeakKeyDictionary()
        self._num_roots = 1
        self.max_blocks = 0
        self.release()
        self.fit(0)

    @property
    def size_bytes(self) -> int:
        return len(self._data[0]) * self._block_bytes

    def fit(self, slot_bytes: int) -> None:
        """Leave `slot_bytes` of the bound to the slots; the kept blocks are dropped if they do not fit beside them."""
        room = min(int(self._max_bytes * SHARE), self._max_bytes - slot_bytes)
        self.max_blocks = max(room, 0) // self._block_bytes
        if len(self._data[0]) > self.max_blocks:
            self.release()

    def release(self) -> None:
        """Forget everything and free its memory."""
        self._blocks: dict[BlockKey, int] = {}
        self._used: OrderedDict[int, BlockKey] = OrderedDict()  # least recently used first, and each block before the one it follows
        self._free: list[int] = []
        self._data = [self._allocate(part, 0) for part in self._shape.parts]

    def find_beginning(self, adapter: Adapter | None, tokens: np.ndarray) -> Begun:
        """Find the longest known beginning of a prompt [L] int64; at least one token of it remains to be computed."""
        found: list[int] = []
        parent = self._root(adapter)
        missing = None
        for key in _keys(tokens[:-1]):
            block = self._blocks.get((parent, key))
            if block is None:
                missing = (parent, key) if len(found) < self.max_blocks else None
                break
            found.append(parent := block)
        self._touch(found)
        return Begun(tuple(found), missing)

    def load(self, begun: Iterable[tuple[int, Begun]], cache: SlotCache) -> None:
        """Copy the known beginnings of prompts to the slots beside them."""
        pairs = [(slot, place, block) for slot, known in begun for place, block in enumerate(known.blocks)]
        if pairs:
            slots, places, blocks = self._send(pairs)
            for part, kept in enumerate(self._data):
                cache.blocks(part, BLOCK)[slots, :, places] = kept[blocks]

    def store(self, sequences: Iterable[tuple[Adapter | None, np.ndarray, int]], cache: SlotCache) -> None:
        """Keep the keys and values of sequences: each with the adapter that computed them, its tokens [L] int64, and its slot."""
        copied: dict[int, tuple[int, int]] = {}  # a block that one sequence evicts and another takes is copied once
        for adapter, tokens, slot in sequences:
            copied |= {block: (slot, place) for place, block in self._insert(adapter, tokens)}
        if copied:
            slots, places, blocks = self._send([(slot, place, block) for block, (slot, place) in copied.items()])
            for part, kept in enumerate(self._data):
                kept[blocks] = cache.blocks(part, BLOCK)[slots, :, places]

    def _insert(self, adapter: Adapter | None, tokens: np.ndarray) -> list[tuple[int, int]]:
        """Make blocks for the new part of a sequence [L] int64; returns (place in the sequence, number) of each new block."""
        keys = list(_keys(tokens))[: self.max_blocks]
        chain: list[int] = []
        parent = self._root(adapter)
        while len(chain) < len(keys) and (known := self._blocks.get((parent, keys[len(chain)]))) is not None:
            chain.append(parent := known)
        self._touch(chain)  # so that none of them is evicted for those that follow
        first = len(chain)
        for key in keys[first:]:
            block = self._take()
            self._blocks[parent, key] = block
            self._used[block] = (parent, key)
            chain.append(parent := block)
        self._touch(chain)
        return list(enumerate(chain))[first:]

    def _take(self) -> int:
        """Return the number of a block that is free, or was least recently used."""
        if not self._free and len(self._data[0]) < self.max_blocks:
            self._grow()
        if self._free:
            return self._free.pop()
        block, key = self._used.popitem(last=False)
        del self._blocks[key]
        return block

    def _grow(self) -> None:
        held = len(self._data[0])
        count = min(max(FIRST_BLOCKS, 2 * held), self.max_blocks)
        for part, old in enumerate(self._data):
            self._data[part] = new = self._allocate(part, count)
            new[:held] = old
        self._free += range(count - 1, held - 1, -1)

    def _touch(self, chain: Sequence[int]) -> None:
        """Note that blocks, each of which follows the one before it, are used now."""
        for block in reversed(chain):
            self._used.move_to_end(block)

    def _root(self, adapter: Adapter | None) -> int:
        """Return the number under which the first blocks of an adapter's sequences are found; it is negative, unlike a block's."""
        if adapter is None:
            return -1
        if adapter not in self._roots:
            self._num_roots += 1
            self._roots[adapter] = -self._num_roots
        return self._roots[adapter]

    def _allocate(self, part: int, blocks: int) -> Tensor:
        (heads, size), dtype = self._shape.sizes(part)
        return torch.empty(blocks, heads, BLOCK, size, dtype=dtype, device=self._device)

    def _send(self, rows: list[tuple[int, int, int]]) -> Iterable[Tensor]:
        return upload(np.array(rows).T, self._device)


def _keys(tokens: np.ndarray) -> Iterable[bytes]:
    """Yield the tokens of each whole block as bytes: 2 x 128 bytes for [L] int64 with L = 40."""
    raw, size = tokens.astype(np.int64, copy=False).tobytes(), BLOCK * 8
    return (raw[i : i + size] for i in range(0, len(raw) - size + 1, size))
