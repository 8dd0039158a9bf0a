"""The slot cache keeps what is written through growth and moves, and attention over it equals a plain one."""

import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from offbeat.engine.cache import SHRINKS_AFTER_S, CacheShape, SlotCache, attend, attend_by_products

CPU = torch.device("cpu")
SHAPE = CacheShape(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32)


def filled(lengths: list[int], *, max_slots: int = 8) -> tuple[SlotCache, torch.Tensor]:
    cache = SlotCache(SHAPE, device=CPU, max_slots=max_slots, max_positions=200)
    content = torch.randn(2, 2, len(lengths), 2, max(lengths), 4)
    step = cache.prefill(np.arange(len(lengths)), starts=np.zeros(len(lengths), np.int64), lengths=np.array(lengths))
    for layer in range(2):
        keys, values = step.extend(layer, content[layer, 0], content[layer, 1])
        assert torch.equal(keys, content[layer, 0]) and torch.equal(values, content[layer, 1]) and step.mask is None
    return cache, content


def test_content_survives_growth_in_slots_and_positions():
    cache, content = filled([5, 3])
    cache.reserve(slots=7, positions=100)
    assert cache.slots >= 7 and cache.positions >= 100
    keys, values = cache.layer(1)
    assert torch.equal(keys[:2, :, :5], content[1, 0]) and torch.equal(values[:2, :, :5], content[1, 1])
    assert cache.size_bytes == cache.slots * cache.positions * 2 * 2 * 2 * 4 * 4


def test_growth_stops_at_the_bounds_it_was_given():
    cache = SlotCache(SHAPE, device=CPU, max_slots=5, max_positions=40)
    cache.reserve(slots=4, positions=33)
    cache.reserve(slots=5, positions=40)
    assert (cache.slots, cache.positions) == (5, 64)


def test_a_copy_takes_the_memory_of_one_layer_beside_the_cache(monkeypatch):
    shape = CacheShape(num_layers=16, num_kv_heads=2, head_dim=4, dtype=torch.float32)
    cache = SlotCache(shape, device=CPU, max_slots=64, max_positions=512)
    cache.reserve(slots=8, positions=64)
    live: list[weakref.ref] = []
    most = 0
    allocate = SlotCache._allocate

    def watched(self, part, slots, positions):
        nonlocal most
        tensor = allocate(self, part, slots, positions)
        live.append(weakref.ref(tensor))
        old = sum(layer.nbytes for layer in self._data if not any(ref() is layer for ref in live))
        most = max(most, old + sum(new.nbytes for ref in live if (new := ref()) is not None))
        return tensor

    monkeypatch.setattr(SlotCache, "_allocate", watched)
    cache.reserve(slots=16, positions=64)
    assert cache.size_bytes < most <= cache.size_bytes * (1 + 1 / 16)


def test_no_growth_takes_more_than_its_bytes_and_what_is_not_in_use_gives_way():
    shape = CacheShape(num_layers=2, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    cache = SlotCache(shape, device=CPU, max_slots=100, max_positions=10_000, max_bytes=shape.bytes_per_token * 3200 + 7)
    assert cache.max_tokens == 3200
    for slots, positions in ((50, 64), (2, 1500), (3, 40), (10, 320), (100, 32), (1, 3200), (33, 90)):
        cache.reserve(slots=slots, positions=positions)
        assert cache.slots >= slots and cache.positions >= positions and cache.slots * cache.positions <= 3200


def test_content_survives_where_a_cache_gives_up_slots_for_positions():
    cache = SlotCache(SHAPE, device=CPU, max_slots=8, max_positions=256, max_bytes=SHAPE.bytes_per_token * 256)
    cache.reserve(slots=8, positions=32)
    keys, values = torch.randn(2, 2, 20, 4), torch.randn(2, 2, 20, 4)
    cache.prefill(np.arange(2), starts=np.zeros(2, np.int64), lengths=np.array([20, 20])).extend(1, keys, values)
    cache.reserve(slots=2, positions=100)
    assert torch.equal(cache.layer(1)[0][:2, :, :20], keys) and torch.equal(cache.layer(1)[1][:2, :, :20], values)


@pytest.mark.parametrize("window", [None, 3])
def test_new_tokens_attend_to_what_their_own_slot_holds_and_to_those_before_them(window):
    cache, content = filled([31, 7, 6, 1])
    slots, starts, lengths = np.array([3, 0, 2]), np.array([1, 31, 0]), np.array([5, 2, 6])
    step = cache.prefill(slots, starts=starts, lengths=lengths)
    new_keys, new_values, queries = torch.randn(3, 2, 6, 4), torch.randn(3, 2, 6, 4), torch.randn(3, 2, 6, 4)
    keys, values = step.extend(1, new_keys, new_values)
    got = F.scaled_dot_product_attention(queries, keys, values, attn_mask=step.window_mask(window))
    for row, (slot, start, length) in enumerate(zip(slots, starts, lengths, strict=True)):
        assert step.positions[row, :length].tolist() == list(range(start, start + length)) and step.last[row] == length - 1
        k = torch.cat([content[1, 0, slot, :, :start], new_keys[row, :, :length]], 1)
        v = torch.cat([content[1, 1, slot, :, :start], new_values[row, :, :length]], 1)
        seen = torch.ones(length, start + length, dtype=torch.bool).tril(start)
        seen = seen if window is None else seen.triu(start + 1 - window)
        expected = F.scaled_dot_product_attention(queries[row, :, :length], k, v, attn_mask=seen)
        assert torch.allclose(got[row, :, :length], expected, atol=1e-6)
        assert torch.equal(cache.layer(1)[0][slot, :, : start + length], k)
    assert torch.equal(cache.layer(1)[0][1, :, :7], content[1, 0, 1, :, :7]), "other slots keep what they hold"


def test_moved_slots_carry_their_content():
    cache, content = filled([5, 5, 5, 5])
    cache.move([3], [0], positions=5)
    for layer in range(2):
        assert torch.equal(cache.layer(layer)[0][0, :, :5], content[layer, 0, 3])
        assert torch.equal(cache.layer(layer)[1][1, :, :5], content[layer, 1, 1])


def test_a_decode_step_attends_to_a_rows_own_past_and_itself():
    lengths = [31, 7, 1]
    cache, content = filled(lengths)
    step = cache.step(np.array(lengths))
    new_keys, new_values, queries = torch.randn(3, 2, 4), torch.randn(3, 2, 4), torch.randn(3 * 2, 3, 4)
    keys, values = step.extend(1, new_keys, new_values)
    got = attend(queries, keys, values, mask=step.mask, scale=0.5).view(3, 2, 3, 4)
    for row, length in enumerate(lengths):
        k = torch.cat([content[1, 0, row, :, :length], new_keys[row, :, None]], 1)
        v = torch.cat([content[1, 1, row, :, :length], new_values[row, :, None]], 1)
        weights = torch.softmax(0.5 * queries.view(3, 2, 3, 4)[row] @ k.transpose(1, 2), -1)
        assert torch.allclose(got[row], weights @ v, atol=1e-6)


def test_a_window_hides_what_is_too_far_back():
    cache, _ = filled([6, 2])
    step = cache.step(np.array([6, 2]))
    visible = (step.window_mask(3)[::2, 0] == 0).nonzero().tolist()
    assert visible == [[0, 4], [0, 5], [0, 6], [1, 0], [1, 1], [1, 2]]


def test_cleared_slots_are_zero_and_the_others_are_not():
    cache, content = filled([5, 3, 4])
    cache.clear([0, 2])
    keys, values = cache.layer(1)
    assert not keys[[0, 2]].any() and not values[[0, 2]].any()
    assert torch.equal(keys[1, :, :3], content[1, 0, 1, :, :3])


def test_half_precision_rounds_what_attention_gives_and_no_score_before_it():
    """Long rows of scores near 20, of which rounding to eight bits would leave little: the result is as near as its own rounding."""
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(6, n, 64, generator=generator).bfloat16() for n in (2, 96, 96))
    mask = torch.zeros(6, 1, 96, dtype=torch.bfloat16)
    scores = queries.double() @ keys.double().transpose(1, 2)
    exact = torch.softmax(scores, -1) @ values.double()
    errors = [
        (attended.double() - exact).norm() / exact.norm()
        for attended in (f(queries, keys, values, mask=mask, scale=1.0) for f in (attend, attend_by_products))]
    assert errors[0] < 0.002 and errors[1] > 2 * errors[0]


def test_a_cache_whose_longest_sample_has_just_filled_it_shrinks_to_fewer_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.engine.cache._SMALL_BYTES", 0)
    cache, content = filled([5])
    cache.reserve(slots=8, positions=5)
    positions = cache.positions
    assert shrink_at_last(cache, slots=1, positions=positions + 1), "its newest token has no keys yet"
    assert (cache.slots, cache.positions) == (1, positions)
    assert torch.equal(cache.layer(1)[0][:1, :, :5], content[1, 0, :1])


@pytest.mark.parametrize("large", [False, True])
def test_a_large_cache_that_is_hardly_in_use_shrinks_to_what_is(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.engine.cache._SMALL_BYTES", 0 if large else 1 << 20)
    cache, content = filled([5, 3, 4])
    cache.reserve(slots=8, positions=100)
    before = cache.size_bytes
    assert not shrink_at_last(cache, slots=8, positions=40), "too much of it is in use"
    assert shrink_at_last(cache, slots=2, positions=5) == large
    assert cache.size_bytes == (before // 16 if large else before)
    keys, values = cache.layer(1)
    assert torch.equal(keys[:2, :, :5], content[1, 0, :2]) and torch.equal(values[:2, :, :5], content[1, 1, :2])
    assert shrink_at_last(cache, slots=0, positions=0) == large


def test_a_cache_that_is_needed_again_within_a_while_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.engine.cache._SMALL_BYTES", 0)
    cache, _ = filled([5])
    cache.reserve(slots=8, positions=100)
    large = cache.size_bytes
    for turn in range(3):
        now_s = turn * (SHRINKS_AFTER_S - 1)
        assert not cache.shrink(slots=0, positions=0, now_s=now_s), "the samples of a turn have ended"
        assert cache.shrinks_at_s == now_s + SHRINKS_AFTER_S
        cache.reserve(slots=6, positions=90)
        assert cache.shrinks_at_s is None and cache.size_bytes == large
    assert not cache.shrink(slots=0, positions=0, now_s=100.0)
    cache.reserve(slots=1, positions=20)
    assert cache.shrinks_at_s is not None, "one sample needs little of it"
    assert cache.shrink(slots=1, positions=20, now_s=100.0 + SHRINKS_AFTER_S) and cache.size_bytes < large / 4


@pytest.mark.parametrize(("likely", "size"), [((7, 64), (7, 64)), ((99, 64), (4, 64)), ((2, 999), (4, 32)), ((0, 0), (4, 32))])
def test_a_cache_grows_at_once_to_what_is_likely_unless_that_is_far_more(likely: tuple[int, int], size: tuple[int, int]) -> None:
    cache = SlotCache(SHAPE, device=CPU, max_slots=100, max_positions=1000)
    cache.likely = likely
    cache.reserve(slots=4, positions=32)
    assert (cache.slots, cache.positions) == size


def shrink_at_last(cache: SlotCache, *, slots: int, positions: int) -> bool:
    """Shrink a cache of which this much has been in use for a while; returns whether it did."""
    assert not cache.shrink(slots=slots, positions=positions, now_s=0.0)
    return cache.shrink(slots=slots, positions=positions, now_s=SHRINKS_AFTER_S)
