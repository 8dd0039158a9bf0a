"""Dealing tensors out: every tensor whole at one rank, in equal loads, with as few bytes on the way as there are."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.sync import shard_exchange
from offbeat.sync.broadcast import Spec
from offbeat.sync.shard_exchange import Box, Holdings, ShardExchange
from ranks import run_ranks

WORLD = 3


def blocks_of(shape: tuple[int, ...], seed: int) -> list[Box]:
    """What each rank holds of a tensor: a part along some dimension, parts of uneven sizes or none, or all of it."""
    dim = seed % (len(shape) + 1)
    if dim == len(shape):
        return [Box((0,) * len(shape), shape)] * WORLD
    bounds = sorted([0, shape[dim], *((seed * (7 + i)) % (shape[dim] + 1) for i in range(WORLD - 1))])
    return [
        Box(tuple(low if d == dim else 0 for d in range(len(shape))), tuple(high - low if d == dim else s for d, s in enumerate(shape)))
        for low, high in itertools.pairwise(bounds)]


def planned(shapes: list[tuple[int, ...]], seed: int, *, owners: list[int], dtype: str = "float32", num_together: int = 1) -> ShardExchange:
    names = [f"t{i}" for i in range(len(shapes))]
    blocks = {name: blocks_of(shape, seed + i) for i, (name, shape) in enumerate(zip(names, shapes, strict=True))}
    together = [names[i : i + num_together] for i in range(0, len(names), num_together)]
    holdings = [Holdings({name: each[rank] for name, each in blocks.items()}) for rank in range(WORLD)]
    specs = [Spec(name, dtype, shape) for name, shape in zip(names, shapes, strict=True)]
    return ShardExchange.plan(holdings, specs, together=together, owners=owners)


@settings(max_examples=100, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=12), seed=st.integers(0, 99),
    owners=st.sets(st.integers(0, WORLD - 1), min_size=1).map(sorted), num_together=st.integers(1, 3))
def test_every_tensor_has_one_owner_and_every_part_comes_once(
    shapes: list[tuple[int, ...]], seed: int, owners: list[int], num_together: int,
) -> None:
    made = planned(shapes, seed, owners=owners, num_together=num_together)
    assert list(made.owners) == list(made.specs) and set(made.owners.values()) <= set(owners)
    assert made.num_bytes == sum(4 * torch.Size(shape).numel() for shape in shapes)
    seen = {name: torch.zeros(spec.shape, dtype=torch.int64) for name, spec in made.specs.items()}
    for (_, owner), parcels in made.parcels.items():
        for parcel in parcels:
            assert made.owners[parcel.name] == owner
            parcel.box.of(seen[parcel.name]).add_(1)
    assert all((count == 1).all() for count in seen.values())
    for start in range(0, len(shapes), num_together):
        assert len({made.owners[f"t{i}"] for i in range(start, min(start + num_together, len(shapes)))}) == 1
    loads = {owner: sum(made.specs[name].num_bytes for name in made.names(owner)) for owner in owners}
    groups = [sum(4 * torch.Size(shape).numel() for shape in shapes[i : i + num_together]) for i in range(0, len(shapes), num_together)]
    assert max(loads.values()) - min(loads.values()) <= max(groups)


def test_what_the_owner_has_itself_does_not_travel_and_the_nearest_sends_the_rest() -> None:
    halves = [Box((0,), (2,)), Box((2,), (2,)), Box((0,), (2,)), Box((2,), (2,))]  # two replicas of two shards
    made = ShardExchange.plan([Holdings({"a": box}) for box in halves], [Spec("a", "float32", (4,))], together=[["a"]], owners=[3])
    boxes = {pair: [parcel.box for parcel in parcels] for pair, parcels in made.parcels.items()}
    assert boxes == {(3, 3): [halves[3]], (2, 3): [halves[2]]}


def _whole(made: ShardExchange, name: str) -> Tensor:
    spec = made.specs[name]
    return (torch.arange(torch.Size(spec.shape).numel(), dtype=torch.float32) * 1.37).view(spec.shape)


SHAPES = [(40, 33), (7,), (5, 6, 9), (64, 2), (3, 50), (1,), (28, 28), (90,)]


def _exchange(groups, least_bytes):
    """Bytes that this rank sent and received in each exchange, where its tensors are what they should be."""
    shard_exchange.BUCKET_BYTES, shard_exchange._LEAST_BYTES = least_bytes, least_bytes
    counted = []
    original = shard_exchange.dist.all_to_all_single

    def counting(got, given, **kwargs):
        counted.append((len(given), len(got)))
        return original(got, given, **kwargs)

    shard_exchange.dist.all_to_all_single = counting
    found = []
    for seed, dtype, owners in ((1, "float32", [0, 1, 2]), (5, "bfloat16", [0, 1, 2]), (8, "float32", [1])):
        made = planned(SHAPES, seed, owners=owners, dtype=dtype)
        holdings = {f"t{i}": blocks_of(shape, seed + i)[groups.rank] for i, shape in enumerate(SHAPES)}
        held = {name: box.of(_whole(made, name)) for name, box in holdings.items()}
        counted.clear()
        with groups.sync.region("publish"):
            dealt = made.run(held, rank=groups.rank)
        assert list(dealt) == made.names(groups.rank)
        for name, tensor in dealt.items():
            assert torch.equal(tensor, _whole(made, name).to(getattr(torch, dtype))), name
        away = sum(
            parcel.box.count * made.specs[parcel.name].torch_dtype.itemsize for (source, owner), parcels in made.parcels.items()
            for parcel in parcels if owner == groups.rank != source)
        assert sum(got for _, got in counted) == away
        found.append([list(map(max, zip(*counted, strict=True))), len(counted)])
    return found


def test_ranks_get_what_they_are_dealt_in_buckets_of_any_size():
    for limit in (101, 1 << 16):
        for found in run_ranks(_exchange, world=WORLD, argument=limit):
            for (most_sent, most_received), num_rounds in found:
                assert most_sent <= 2 * limit and most_received <= 2 * limit
                assert num_rounds == 1 or limit == 101
