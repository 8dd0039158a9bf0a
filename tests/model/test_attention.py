import numpy as np
import pytest
import torch
from transformers import PreTrainedConfig

from offbeat.data.packing import PackedRow, Segments
from offbeat.errors import ModelError
from offbeat.model.attention import build_plan, packed_attention


def make_row(lengths, prefix=None):
    lengths = np.asarray(lengths)
    segments = Segments(np.cumsum(lengths) - lengths, lengths, np.full(len(lengths), -1) if prefix is None else np.asarray(prefix))
    none = np.zeros(0, np.int64)
    return PackedRow(np.zeros(lengths.sum(), np.int32), np.zeros(lengths.sum(), np.int32), segments, none, none, none, none)


def slow_attention(query, key, value, segments, scale, *, window=None, softcap=None, sinks=None):
    """[1, H, R, D] by a loop over tokens, straight from the definitions of Segments and of what layers may ask for."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    output = torch.empty_like(query)
    for start, length, prefix in zip(segments.starts, segments.lengths, segments.prefix, strict=True):
        before = list(range(segments.starts[prefix], segments.starts[prefix] + segments.lengths[prefix])) if prefix >= 0 else []
        for token in range(start, start + length):
            seen = (before + list(range(start, token + 1)))[-(window or 99) :]
            scores = (query[:, :, token : token + 1] * key[:, :, seen]).sum(-1) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            total = scores.exp().sum(-1, keepdim=True) + (0 if sinks is None else sinks[:, None].exp())
            output[:, :, token] = ((scores.exp() / total)[..., None] * value[:, :, seen]).sum(2)
    return output.transpose(1, 2)


ROWS = {
    "one sequence": make_row([6]),
    "equal lengths": make_row([4, 4, 4]),
    "many lengths": make_row([1, 2, 3, 5, 8, 13, 14]),
    "equal groups": make_row([3, 3, 4, 4, 4, 4], [-1, -1, 0, 1, 0, 1]),
    "no order": make_row([5, 2, 5, 2, 9]),
    "families of groups": make_row([3, 2, 1, 3, 3, 2, 1], [-1, 0, 0, -1, -1, 4, 4]),
    "ragged groups": make_row([2, 3, 9, 1, 4, 5, 6], [-1, -1, -1, 0, 2, 1, 2]),
}


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
