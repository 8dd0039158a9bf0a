import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig

from attention_rows import ROWS, make_row, slow_attention
from offbeat.errors import ModelError
from offbeat.model import attention
from offbeat.model.attention import ScoreForm, build_plan, explicit_attention, fused_attention, packed_attention, window_mask

ASKED = {
    "plain": {}, "a window": {"window": 4}, "a window of one": {"window": 1}, "a cap": {"softcap": 1.5}, "sinks": {"sinks": True},
    "all": {"window": 3, "softcap": 1.5, "sinks": True},
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", ROWS)
def test_packed_attention_and_its_gradients_equal_a_loop_over_tokens(name, asked):
    row, asked = ROWS[name], dict(ASKED[asked])
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, len(row), 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    weights = torch.randn(1, len(row), 4, 8, dtype=torch.float64)
    inputs = [query, key, value]
    if asked.pop("sinks", False):
        inputs.append(torch.randn(4, dtype=torch.float64, requires_grad=True))
    sinks, window, softcap = (*inputs[3:], None)[0], asked.get("window"), asked.get("softcap")
    got, _ = packed_attention(
        torch.nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window, softcap=softcap, s_aux=sinks,
        attention_plan=build_plan(row))
    expected = slow_attention(query, key, value, row.segments, 0.3, window=window, softcap=softcap, sinks=sinks)
    # The shares of written-out scores are float32, as in transformers.
    tolerance = {} if sinks is softcap is None else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(got, expected, **tolerance)
    for mine, theirs in zip(
        torch.autograd.grad((got * weights).sum(), inputs), torch.autograd.grad((expected * weights).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **tolerance)


@pytest.mark.parametrize(("dtype", "masked", "copies"), [
    (torch.bfloat16, False, False), (torch.bfloat16, True, True), (torch.float32, False, True), (torch.float32, True, True)])
def test_keys_are_copied_for_each_head_where_a_device_has_no_kernel_otherwise(monkeypatch, dtype, masked, copies):
    seen = []

    def kernel(query, key, value, **settings):
        seen.append((query.device.type, key.shape[1], value.shape[1], settings["enable_gqa"]))
        return scaled_dot_product_attention(query, key, value, **settings)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", kernel)
    results = {}
    for device in ("cpu", "meta"):
        query, key, value = (torch.ones(2, heads, 6, 8, dtype=dtype, device=device) for heads in (4, 2, 2))
        mask = window_mask(6, 3, torch.device(device)) if masked else None
        results[device] = fused_attention(query, key, value, mask, scale=0.3)
    assert seen == [("cpu", 2, 2, True), ("meta", 4, 4, False) if copies else ("meta", 2, 2, True)]
    assert results["meta"].shape == results["cpu"].shape == (2, 4, 6, 8)


def test_copied_keys_change_no_number():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 40, 8) for heads in (4, 2, 2))
    mask = window_mask(40, 7, torch.device("cpu"))
    more = [part.repeat_interleave(2, dim=1) for part in (key, value)]
    shared, copied = fused_attention(query, key, value, mask, scale=0.3), fused_attention(query, *more, mask, scale=0.3)
    torch.testing.assert_close(shared, copied, atol=1e-6, rtol=0)
    torch.testing.assert_close(shared, explicit_attention(query, key, value, mask, form=ScoreForm(0.3)), atol=1e-6, rtol=0)


def test_the_masks_of_a_window_are_made_once_and_where_it_cuts_nothing_not_at_all():
    plan = build_plan(ROWS["ragged groups"])
    device = torch.device("cpu")
    assert plan.masks(4, device) is plan.masks(4, device)
    assert plan.masks(plan.longest_span, device) == plan.masks(None, device) == [bucket.mask for bucket in plan.buckets]
    assert plan.masks(4, device)[0] is None, "a segment of two tokens is shorter than the window"


def test_sequences_of_one_length_are_a_view_without_any_gather():
    plan = build_plan(ROWS["equal lengths"])
    assert [(bucket.n, bucket.num_queries, bucket.mask) for bucket in plan.buckets] == [(3, 4, None)]
    assert plan.query_index is plan.key_index is plan.restore is None


def test_the_mask_of_equal_groups_is_one_for_all_of_them():
    plan = build_plan(ROWS["equal groups"])
    assert [(bucket.n, bucket.num_queries, bucket.num_keys) for bucket in plan.buckets] == [(2, 3, 3), (4, 4, 7)]
    assert plan.buckets[1].mask.shape == (1, 1, 4, 7)
    assert plan.query_index is plan.restore is None


def test_buckets_waste_at_most_a_quarter_and_are_few():
    lengths = np.sort(np.clip(np.random.default_rng(0).lognormal(4, 0.9, 128), 1, 512).astype(int))
    plan = build_plan(make_row(lengths))
    padded = sum(bucket.n * bucket.num_queries for bucket in plan.buckets)
    assert padded * 0.75 <= lengths.sum()
    assert len(plan.buckets) <= 10


def layer(kind="full_attention", *, is_causal=True):
    module = torch.nn.Module()
    module.config = PreTrainedConfig(layer_types=[kind])
    module.layer_idx, module.is_causal = 0, is_causal
    return module


@pytest.mark.parametrize(("module", "arguments", "match"), [
    (layer(), {"position_bias": 1}, "position_bias"),
    (layer(), {"is_causal": False}, "lets tokens attend to later ones"),
    (layer(is_causal=False), {}, "lets tokens attend to later ones"),
    (layer("sliding_attention"), {}, "of kind sliding_attention but asks for plain causal attention"),
    (layer("chunked_attention"), {}, "of kind chunked_attention but asks"),
])
def test_what_packed_rows_cannot_compute_is_refused(module, arguments, match):
    query = torch.randn(1, 2, 6, 8)
    with pytest.raises(ModelError, match=match):
        packed_attention(module, query, query, query, None, attention_plan=build_plan(ROWS["one sequence"]), **arguments)


def test_packed_rows_take_no_mask():
    query = torch.randn(1, 2, 6, 8)
    with pytest.raises(ModelError, match="1 rows and a mask"):
        packed_attention(layer(), query, query, query, torch.ones(1, 1, 6, 6), attention_plan=build_plan(ROWS["one sequence"]))
