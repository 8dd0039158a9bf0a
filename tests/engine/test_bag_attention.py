"""Attention by bags is attention: over narrow and wide caches, for any number of query heads, and in bfloat16 with exact scores."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from offbeat.engine.bag_attention import BagAttention, fast_attention, weighted_sums
from offbeat.engine.cache import CacheShape, SlotCache

CPU = torch.device("cpu")


def shape(dtype: torch.dtype) -> CacheShape:
    return CacheShape(num_layers=2, num_kv_heads=2, head_dim=16, dtype=dtype, for_bags=True)


@pytest.mark.parametrize("sharing", [1, 3, 8])
@pytest.mark.parametrize("room", [32, 96, 400])  # the last is more than twice as wide as what is read
def test_a_step_attends_to_each_rows_own_past_and_itself(sharing, room):
    generator = torch.Generator().manual_seed(sharing)
    lengths = np.array([31, 7, 1, 20])
    cache = SlotCache(shape(torch.float32), device=CPU, max_slots=6, max_positions=512)
    cache.reserve(slots=6, positions=room)
    past = torch.randn(2, 2, 4, 2, 31, 16, generator=generator)
    prompts = cache.prefill(np.arange(4), starts=np.zeros(4, np.int64), lengths=lengths)
    step = cache.step(lengths)
    attend = BagAttention().of_step(step, num_heads=2 * sharing, scale=0.3)
    for layer in range(2):
        prompts.extend(layer, past[layer, 0], past[layer, 1])
        keys, values = torch.randn(2, 4, 2, 16, generator=generator)
        queries = torch.randn(4, 2 * sharing, 16, generator=generator)
        got = attend(layer, queries, keys, values).view(4, 2 * sharing, 16)
        for row, length in enumerate(lengths):
            k = torch.cat([past[layer, 0, row, :, :length], keys[row, :, None]], 1)
            v = torch.cat([past[layer, 1, row, :, :length], values[row, :, None]], 1)
            wanted = F.scaled_dot_product_attention(queries[row, :, None], k, v, scale=0.3, enable_gqa=True)[:, 0]
            assert torch.allclose(got[row], wanted, atol=1e-6)


def test_for_bags_survive_growth_moves_and_clearing():
    cache = SlotCache(shape(torch.bfloat16), device=CPU, max_slots=8, max_positions=200)
    keys, values = torch.randn(2, 3, 2, 20, 16).bfloat16()
    cache.prefill(np.arange(3), starts=np.zeros(3, np.int64), lengths=np.full(3, 20)).extend(1, keys, values)
    cache.reserve(slots=7, positions=100)
    cache.move([2], [0], positions=20)
    cache.clear([1])
    stored_keys, stored_values = cache.layer(1)
    assert stored_keys.dtype == stored_values.dtype == torch.float32 and stored_keys.stride(2) == 1
    for stored, new in ((stored_keys, keys), (stored_values, values)):
        assert torch.equal(stored[0, :, :20].bfloat16(), new[2]) and torch.equal(stored[2, :, :20].bfloat16(), new[2])
        assert not stored[1].any()
    assert cache.size_bytes == cache.slots * cache.positions * 2 * 2 * 2 * 16 * 4


def test_in_bfloat16_nothing_but_the_result_is_rounded():
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 3, 2, 96, 16, generator=generator).bfloat16()
    queries = (8 * torch.randn(3, 4, 16, generator=generator)).bfloat16()
    cache = SlotCache(shape(torch.bfloat16), device=CPU, max_slots=3, max_positions=96)
    cache.prefill(np.arange(3), starts=np.zeros(3, np.int64), lengths=np.full(3, 95)).extend(0, keys[:, :, :95], values[:, :, :95])
    attend = BagAttention().of_step(cache.step(np.full(3, 95)), num_heads=4, scale=1.0)
    got = attend(0, queries, keys[:, :, 95], values[:, :, 95]).view(3, 4, 16)
    wanted = F.scaled_dot_product_attention(queries.float()[:, :, None], keys.float(), values.float(), scale=1.0, enable_gqa=True)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.float(), wanted[:, :, 0], rtol=2**-8, atol=1e-5)


def test_sums_of_rows_are_products_with_their_weights():
    table, weights = torch.randn(20, 40), torch.randn(12)
    rows = torch.randint(20, (12,), dtype=torch.int32)
    got = weighted_sums(table, rows, torch.tensor([0, 5], dtype=torch.int32), weights)
    wanted = torch.stack([weights[:5] @ table[rows[:5]], weights[5:] @ table[rows[5:]]])
    assert torch.allclose(got, wanted, atol=1e-5)
    assert torch.equal(weighted_sums(torch.cat([table, table], 1)[:, :40], rows, torch.tensor([0, 5], dtype=torch.int32), weights), got)


def test_bags_are_for_cpus():
    assert not fast_attention(torch.device("meta")).for_bags
