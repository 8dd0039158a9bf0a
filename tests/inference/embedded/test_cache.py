"""The slot cache keeps what is written through growth and moves, and attention over it equals a plain one."""

import numpy as np
import torch

from offbeat.inference.embedded.cache import CacheShape, PromptRows, SlotCache, attend

CPU = torch.device("cpu")
SHAPE = CacheShape(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32)


def filled(lengths: list[int], *, max_slots: int = 8) -> tuple[SlotCache, torch.Tensor]:
    cache = SlotCache(SHAPE, device=CPU, max_slots=max_slots, max_positions=200)
    content = torch.randn(2, 2, len(lengths), 2, max(lengths), 4)
    cache.reserve(slots=len(lengths), positions=max(lengths))
    rows = torch.arange(len(lengths))
    for layer in range(2):
        cache.write_prompts(layer, content[layer, 0], content[layer, 1], PromptRows(rows, rows))
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


def test_one_prompt_can_fill_several_slots():
    cache = SlotCache(SHAPE, device=CPU, max_slots=4, max_positions=32)
    cache.reserve(slots=4, positions=3)
    keys, values = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4)
    cache.write_prompts(0, keys, values, PromptRows(torch.tensor([3, 0, 1]), torch.tensor([1, 0, 1])))
    stored = cache.layer(0)[0][:, :, :3]
    assert torch.equal(stored[3], keys[1]) and torch.equal(stored[0], keys[0]) and torch.equal(stored[1], keys[1])


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
