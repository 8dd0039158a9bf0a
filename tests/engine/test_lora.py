"""Many adapters in one product, against one matrix product per row."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.engine.lora import BASE, AdapterRows, AdapterStack, Linear, segment, shared_length
from offbeat.model.peft_io import Adapter

GROUPS = {"qkv": (Linear("q", 6, 8), Linear("k", 6, 4), Linear("v", 6, 4)), "out": (Linear("o", 8, 6),), "down": (Linear("d", 5, 6),)}
LINEARS = {linear.name: linear for group in GROUPS.values() for linear in group}
CPU = torch.device("cpu")


def adapter(seed: int, *, rank: int = 2, names: str = "qkvo", scaling: float = 0.5) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    linears = [LINEARS[name] for name in names]
    pairs = {
        linear.name: (torch.randn(rank, linear.inputs, generator=generator), torch.randn(linear.outputs, rank, generator=generator))
        for linear in linears
    }
    return Adapter(rank, scaling, pairs)


def stack_of(adapters: list[Adapter]) -> AdapterStack:
    stack = AdapterStack(GROUPS, device=CPU)
    stack.place(adapters)
    return stack


def slow(group: str, x: torch.Tensor, y: torch.Tensor, adapters: list[Adapter | None]) -> torch.Tensor:
    """Row by row, layer by layer."""
    result = y.clone()
    for row, own in enumerate(adapters):
        first = 0
        for linear in GROUPS[group]:
            if own is not None and linear.name in own.pairs:
                a, b = own.pairs[linear.name]
                result[row, first : first + linear.outputs] += own.scaling * (b @ (a @ x[row]))
            first += linear.outputs
    return result


def check(stack: AdapterStack, adapters: list[Adapter | None]) -> None:
    slots = np.array([BASE if own is None else stack.adapters.index(own) for own in adapters])
    rows = AdapterRows(stack, slots)
    for group, linears in GROUPS.items():
        x, y = torch.randn(len(slots), linears[0].inputs), torch.randn(len(slots), sum(linear.outputs for linear in linears))
        expected = slow(group, x, y, adapters)
        before = y.clone()
        rows.add(group, x, y)
        assert torch.allclose(y, expected, atol=1e-5)
        assert torch.equal(y[slots == BASE], before[slots == BASE])


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=40))
def test_every_row_gets_its_own_adapters_product(slots):
    adapters = [adapter(0), adapter(1, rank=3, scaling=2.0), adapter(2, names="qv"), adapter(3, names="k", rank=1), adapter(4)]
    if max(slots) >= 0:
        check(stack_of(adapters), [None if slot == BASE else adapters[slot] for slot in slots])


@pytest.mark.parametrize("counts", [[90, 1, 1], [1, 1, 60, 2], [3] * 5, [7], [99, 99, 1]])
def test_uneven_segments_are_computed_without_padding_them_all(counts):
    adapters = [adapter(seed) for seed in range(len(counts))]
    slots = np.repeat(np.arange(len(counts)), counts)
    np.random.default_rng(0).shuffle(slots)
    check(stack_of(adapters), [adapters[slot] for slot in slots])
    segments = segment(slots)
    gathered = sum(piece.length * (piece.slots.stop - piece.slots.start) for piece in segments.pieces)
    assert len(segments.index) == gathered <= len(slots) + 32 * len(counts)
    assert sorted(segments.index[~segments.padding]) == list(range(len(slots)))
    assert (slots[segments.index] == segments.slot).all(), "padding repeats rows of its own adapter"


def test_the_common_length_weighs_padding_against_products():
    assert shared_length(np.array([5])) == 5
    assert shared_length(np.array([4] * 16)) == 4
    assert shared_length(np.array([4, 5, 4, 6])) == 6
    assert shared_length(np.array([4, 4, 4, 200])) == 4
    assert shared_length(np.array([300, 20])) == 20
    assert shared_length(np.array([300, 1])) == 1


def test_neighbouring_slots_share_a_product_and_slots_without_rows_take_no_part():
    pieces = segment(np.array([2, 3, 7, BASE, 2, 3, 7])).pieces
    assert [(piece.slots, piece.rows, piece.length) for piece in pieces] == [
        (slice(2, 4), slice(0, 4), 2), (slice(7, 8), slice(4, 6), 2)]


@given(st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=8))
def test_the_stack_holds_what_was_placed_last_whatever_was_before(placements):
    adapters = [adapter(0), adapter(1, rank=3), adapter(2, names="d"), adapter(3, rank=1, names="ov"), adapter(4), adapter(5, names="q")]
    stack = AdapterStack(GROUPS, device=CPU)
    for chosen in placements:
        wanted = [adapters[i] for i in sorted(chosen)]
        layout, before = stack.layout, set(stack.adapters)
        stack.place(wanted)
        assert set(stack.adapters) == set(wanted) and len(stack.adapters) == len(wanted)
        assert (stack.layout == layout) == (before == set(wanted))
        for own in wanted:
            assert stack.read(own).fingerprint() == own.fingerprint()
        if wanted:
            check(stack, [*wanted, None, *wanted])


def test_an_adapter_that_comes_back_is_where_it_was_left_while_there_is_room():
    back, other, third = adapter(0), adapter(1), adapter(2)
    stack, written = stack_of([back, other]), back.fingerprint()
    stack.place([other])
    for a, _ in back.pairs.values():
        a.zero_()  # a second writing would show
    stack.place([other, back])
    assert stack.read(back).fingerprint() == written
    stack.place([other, third])
    stack.place([back])
    assert stack.read(back).fingerprint() == back.fingerprint() != written


def test_an_adapter_that_overflows_reaches_no_other_row():
    wild = Adapter(2, 0.5, {name: (a * 1e30, b * 1e30) for name, (a, b) in adapter(0).pairs.items()})
    tame = adapter(1)
    stack = stack_of([wild, tame])
    # Segments of unequal length, so that there is padding.
    slots = np.array([0, 1, 1, BASE, 1, 0, 1])
    x, y = torch.randn(7, 6), torch.randn(7, 16)
    adapters = [None if slot == BASE else (wild, tame)[slot] for slot in slots]
    expected = slow("qkv", x, y, adapters)
    AdapterRows(stack, slots).add("qkv", x, y)
    assert not y[slots == 0].isfinite().all()
    assert torch.allclose(y[slots != 0], expected[slots != 0], atol=1e-5)


def test_a_layer_in_bfloat16_gets_a_float32_product():
    own = adapter(0)
    stack = stack_of([own])
    x, y = torch.randn(3, 6).bfloat16(), torch.zeros(3, 16).bfloat16()
    AdapterRows(stack, np.zeros(3, np.int64)).add("qkv", x, y)
    assert torch.equal(y, slow("qkv", x.float(), torch.zeros(3, 16), [own] * 3).bfloat16())
    assert stack.read(own).fingerprint() == own.fingerprint()
