"""What is kept of earlier sequences is what was computed of them, is found by those that begin alike alone, and stays within its bound."""

import random

import numpy as np
import pytest
import torch

from offbeat.engine.cache import CacheShape, SlotCache
from offbeat.engine.prefixes import BLOCK, FIRST_BLOCKS, SHARE, PrefixCache
from offbeat.model.peft_io import Adapter

CPU = torch.device("cpu")
SHAPE = CacheShape(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32)
BLOCK_BYTES = SHAPE.bytes_per_token * BLOCK


def kept(blocks: int) -> PrefixCache:
    return PrefixCache(SHAPE, device=CPU, max_bytes=int(blocks * BLOCK_BYTES / SHARE))


def computed(tokens: np.ndarray, owner: int = 0) -> torch.Tensor:
    """[layers, 2, kv_heads, L, head_dim], what a model whose every number depends on all tokens before would store."""
    position = torch.from_numpy(np.cumsum((tokens + 1) * np.arange(3, 3 + len(tokens)) % 997) + owner * 0.5).float()
    return position[:, None] * torch.arange(1, 2 * 2 * 2 * 4 + 1).view(2, 2, 2, 1, 4)


def write(cache: SlotCache, slot: int, content: torch.Tensor) -> None:
    for layer in range(2):
        for part, new in zip(cache.layer(layer), content[layer], strict=True):
            part[slot, :, : new.shape[1]] = new


def test_random_sequences_begin_with_what_was_computed_of_the_same_tokens_by_the_same_weights():
    rng = random.Random(5)
    cache = SlotCache(SHAPE, device=CPU, max_slots=3, max_positions=256)
    cache.reserve(slots=3, positions=256)
    owners = [None, Adapter(1, 1.0, {}), Adapter(1, 1.0, {})]
    hits = 0
    for capacity in (1, 3, 20, 200):
        prefixes, said = kept(capacity), []
        for _ in range(120):
            old = rng.choice(said) if said and rng.random() < 0.8 else []
            tokens = np.array(old[: rng.randrange(1 + len(old))] + [rng.randrange(2) for _ in range(rng.randrange(1, 60))], np.int64)[:250]
            said.append(tokens.tolist())
            number = rng.randrange(3)
            content = computed(tokens, number)
            begun = prefixes.find_beginning(owners[number], tokens)
            hits += len(begun.blocks)
            assert begun.num_tokens < len(tokens)
            for layer in range(2):
                cache.layer(layer)[0].fill_(-1.0)
                cache.layer(layer)[1].fill_(-1.0)
            prefixes.load([(1, begun)], cache)
            for layer in range(2):
                for part, want in zip(cache.layer(layer), content[layer], strict=True):
                    assert torch.equal(part[1, :, : begun.num_tokens], want[:, : begun.num_tokens])
                    assert (part[1, :, begun.num_tokens :] == -1).all() and (part[0] == -1).all()
            write(cache, 2, content)
            prefixes.store([(owners[number], tokens, 2)], cache)
            again = prefixes.find_beginning(owners[number], tokens)
            assert len(again.blocks) == min((len(tokens) - 1) // BLOCK, capacity)
            assert prefixes.size_bytes <= capacity * BLOCK_BYTES
    assert hits > 40


def test_several_sequences_are_stored_and_loaded_at_once_whatever_they_evict():
    cache = SlotCache(SHAPE, device=CPU, max_slots=4, max_positions=128)
    cache.reserve(slots=4, positions=128)
    sequences = [np.arange(80), np.arange(100), np.arange(1000, 1090)]
    for slot, tokens in enumerate(sequences):
        write(cache, slot, computed(tokens))
    for capacity in (100, 7):
        prefixes = kept(capacity)
        prefixes.store([(None, tokens, slot) for slot, tokens in enumerate(sequences)], cache)
        begun = [prefixes.find_beginning(None, tokens) for tokens in sequences]
        assert len(begun[2].blocks) == 5
        assert [len(known.blocks) for known in begun[:2]] == ([4, 6] if capacity == 100 else [2, 2]), "the least recently used made room"
        other = SlotCache(SHAPE, device=CPU, max_slots=4, max_positions=128)
        other.reserve(slots=4, positions=128)
        prefixes.load(enumerate(begun), other)
        for slot, tokens in enumerate(sequences):
            known = begun[slot].num_tokens
            assert torch.equal(other.layer(1)[0][slot, :, :known], computed(tokens)[1, 0, :, :known])


def test_the_next_block_tells_which_prompts_can_wait_for_one_another():
    cache = SlotCache(SHAPE, device=CPU, max_slots=1, max_positions=128)
    cache.reserve(slots=1, positions=128)
    prefixes = kept(4)
    adapter = Adapter(1, 1.0, {})
    tokens = np.arange(60)
    assert prefixes.find_beginning(None, tokens).next == prefixes.find_beginning(None, tokens[:17]).next is not None
    assert prefixes.find_beginning(adapter, tokens).next != prefixes.find_beginning(None, tokens).next
    assert prefixes.find_beginning(None, tokens[:16]).next is None, "the last token is always computed"
    prefixes.store([(None, tokens[:40], 0)], cache)
    assert len(prefixes.find_beginning(None, tokens).blocks) == 2 and prefixes.find_beginning(None, tokens).next is not None
    assert prefixes.find_beginning(None, tokens[:48]).next is None
    prefixes.store([(None, np.arange(100), 0)], cache)
    whole = prefixes.find_beginning(None, np.arange(100))
    assert len(whole.blocks) == 4 and whole.next is None, "there is no more room"


def test_memory_grows_with_use_gives_way_to_the_slots_and_is_freed():
    cache = SlotCache(SHAPE, device=CPU, max_slots=1, max_positions=16 * 300)
    cache.reserve(slots=1, positions=16 * 300)
    prefixes = kept(200)
    assert prefixes.size_bytes == 0
    prefixes.store([(None, np.arange(16 * 3), 0)], cache)
    assert prefixes.size_bytes == FIRST_BLOCKS * BLOCK_BYTES
    prefixes.store([(None, np.arange(16 * 300), 0)], cache)
    assert prefixes.size_bytes == 200 * BLOCK_BYTES and len(prefixes.find_beginning(None, np.arange(16 * 300)).blocks) == 200
    limit = int(200 * BLOCK_BYTES / SHARE)
    prefixes.fit(limit - 200 * BLOCK_BYTES)
    assert len(prefixes.find_beginning(None, np.arange(16 * 300)).blocks) == 200
    prefixes.fit(limit - 199 * BLOCK_BYTES)
    assert prefixes.size_bytes == 0 and prefixes.max_blocks == 199
    prefixes.fit(limit)
    prefixes.store([(None, np.arange(16 * 3), 0)], cache)
    assert prefixes.size_bytes == 0 and prefixes.find_beginning(None, np.arange(16 * 3)).blocks == ()
    prefixes.release()
    assert prefixes.size_bytes == 0


@pytest.mark.parametrize("keep", [True, False])
def test_an_adapter_that_is_gone_is_not_mistaken_for_one_that_comes(keep):
    cache = SlotCache(SHAPE, device=CPU, max_slots=1, max_positions=128)
    cache.reserve(slots=1, positions=128)
    prefixes, first = kept(50), Adapter(1, 1.0, {})
    prefixes.store([(first, np.arange(60), 0)], cache)
    first = first if keep else None  # a new object may take its place in memory
    for _ in range(50):
        assert prefixes.find_beginning(Adapter(1, 1.0, {}), np.arange(60)).blocks == ()
