"""Deals the tensors of a model, which ranks hold in parts, to the ranks that want them: each tensor whole to one rank.

Called by the trainer, on all ranks at once, where weights are published or exported. Every rank tells its `Holdings` once; from these all
make the same plan. A rank never has more than its holdings, the tensors that it is dealt, one bucket sent and one received.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from offbeat.pulse import progress
from offbeat.sync.broadcast import Spec, cut
from offbeat.sync.platform import current_platform

BUCKET_BYTES = 32 << 20
"""Most that a rank sends, and receives, in one exchange."""
_LEAST_BYTES = 1 << 16


@dataclass(frozen=True)
class Box:
    """A block of a tensor: `sizes` elements from `offsets` on, along each of its dimensions; with a size of 0 it is empty."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view of this block in the whole tensor: offsets (100, 0) and sizes (50, D) give rows 100 to 149 of a [V, D] tensor."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor


@dataclass(frozen=True)
class Holdings:
    """The block of each tensor that a rank holds, by the tensor's name."""

    boxes: dict[str, Box]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Holdings":
        """Return this rank's blocks of tensors of any shape such as [V, D]: all of a plain tensor, the shard of a DTensor."""
        return cls({name: _box(tensor) for name, tensor in tensors.items()})


def _box(tensor: Tensor) -> Box:
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    (chunk,) = tensor.__create_chunk_list__()  # as torch's own checkpoints ask for it
    return Box(tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes)))


@dataclass(frozen=True)
class Parcel:
    """A block of a tensor that one rank sends to another."""

    name: str
    box: Box


@dataclass(frozen=True, eq=False)
class ShardExchange:
    """Who gets which tensor, and who sends which part of it; the same on every rank.

    Attributes:
        specs: shape and number format in which each tensor is dealt, by its name, in the order of the model.
        owners: the rank that gets each tensor.
        parcels: blocks that rank s sends to rank o, in order, by (s, o); blocks that an owner holds itself are under (o, o).
    """

    specs: dict[str, Spec]
    owners: dict[str, int]
    parcels: dict[tuple[int, int], list[Parcel]]
    world: int

    @classmethod
    def plan(
        cls, holdings: Sequence[Holdings], specs: Sequence[Spec], *, together: Sequence[Sequence[str]], owners: Sequence[int],
    ) -> "ShardExchange":
        """Assign tensors to owners: about as many bytes to each, and each part from the nearest rank that holds it.

        Args:
            holdings: of each rank; blocks of two ranks are the same, or do not overlap.
            specs: all tensors, as they are to be dealt.
            together: names of tensors that have to come to the same owner; each name once.
        """
        by_name = {spec.name: spec for spec in specs}
        weights = {names: sum(by_name[name].num_bytes for name in names) for names in map(tuple, together)}
        load, dealt = dict.fromkeys(owners, 0), dict[str, int]()
        for names in sorted(weights, key=lambda names: -weights[names]):  # the largest first, for even loads
            owner = min(load, key=lambda rank: (load[rank], rank))
            load[owner] += weights[names]
            dealt |= dict.fromkeys(names, owner)
        parcels: dict[tuple[int, int], list[Parcel]] = {}
        for name, spec in by_name.items():
            owner, holders = dealt[name], dict[Box, list[int]]()
            for rank, holding in enumerate(holdings):
                holders.setdefault(holding.boxes[name], []).append(rank)
            assert sum(box.count for box in holders) == prod(spec.shape), f"ranks hold all of {name}, and each part of it alike"
            for box, ranks in holders.items():
                if box.count:
                    source = min(ranks, key=lambda rank: (abs(rank - owner), rank))
                    parcels.setdefault((source, owner), []).append(Parcel(name, box))
        return cls(by_name, {name: dealt[name] for name in by_name}, parcels, len(holdings))

    def names(self, rank: int) -> list[str]:
        """Return the names of the tensors that a rank is dealt, in order."""
        return [name for name, owner in self.owners.items() if owner == rank]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors as they are dealt."""
        return sum(spec.num_bytes for spec in self.specs.values())

    def run(self, tensors: Mapping[str, Tensor], *, rank: int) -> dict[str, Tensor]:
        """Exchange tensors over all ranks; a collective of torch's, for the inside of a region.

        They are plain tensors and DTensors of this rank, of any shape such as [V, D]; not modified. The holder of a part converts it
        before it is sent. Returned are the CPU tensors that this rank is dealt, by name, each whole.
        """
        limit = max(BUCKET_BYTES // self.world, _LEAST_BYTES)
        dealt = {name: torch.empty(self.specs[name].shape, dtype=self.specs[name].torch_dtype) for name in self.names(rank)}
        for parcel in self.parcels.get((rank, rank), ()):
            progress("copy_weights")
            parcel.box.of(dealt[parcel.name]).copy_(self._converted(parcel.name, tensors))
        away = {pair: self._size(parcels) for pair, parcels in self.parcels.items() if pair[0] != pair[1]}
        others = [other for other in range(self.world) if other != rank]
        streams = {other: self._outgoing(self.parcels.get((rank, other), ()), tensors, limit) for other in others}
        inboxes = {other: _Inbox(parcel.box.of(dealt[parcel.name]) for parcel in self.parcels.get((other, rank), ())) for other in others}
        for number in range(-(-max(away.values(), default=0) // limit)):
            progress("copy_weights")
            lengths = [min(max(away.get((other, rank), 0) - number * limit, 0), limit) for other in range(self.world)]
            self._exchange([next(streams[other], []) if other != rank else [] for other in range(self.world)], lengths, inboxes)
        return dealt

    def _exchange(self, parts: Sequence[list[Tensor]], lengths: Sequence[int], inboxes: "Mapping[int, _Inbox]") -> None:
        """Send each rank its bytes, [B] uint8 views that are dropped once copied, and take `lengths` bytes from each."""
        device = current_platform.device
        given = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *chain.from_iterable(parts)])
        sent = [sum(map(len, part)) for part in parts]
        for part in parts:
            part.clear()  # whoever cut them has the same lists
        got = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
        dist.all_to_all_single(got, given, output_split_sizes=list(lengths), input_split_sizes=sent)
        pieces = got.split(lengths)
        for other, inbox in inboxes.items():
            inbox.write_next(pieces[other])

    def _outgoing(self, parcels: Sequence[Parcel], tensors: Mapping[str, Tensor], limit: int) -> Iterator[list[Tensor]]:
        return cut((self._converted(parcel.name, tensors).contiguous() for parcel in parcels), bucket_bytes=limit)

    def _converted(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        return _local(tensors[name]).to(self.specs[name].torch_dtype)

    def _size(self, parcels: Sequence[Parcel]) -> int:
        return sum(parcel.box.count * self.specs[parcel.name].torch_dtype.itemsize for parcel in parcels)


class _Inbox:
    """The blocks that come from one rank, one after the other, in pieces of any length."""

    def __init__(self, places: Iterator[Tensor]) -> None:
        self._places = places
        self._place = self._block = self._rest = torch.empty(0, dtype=torch.uint8)

    def write_next(self, data: Tensor) -> None:
        """Write the next bytes, [B] uint8, into the blocks."""
        while len(data):
            if not len(self._rest):
                self._place = next(self._places)
                self._block = self._place if self._place.is_contiguous() else torch.empty_like(
                    self._place, memory_format=torch.contiguous_format)
                self._rest = self._block.view(-1).view(torch.uint8)
            count = min(len(data), len(self._rest))
            self._rest[:count].copy_(data[:count])
            data, self._rest = data[count:], self._rest[count:]
            if not len(self._rest) and self._block is not self._place:
                self._place.copy_(self._block)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
