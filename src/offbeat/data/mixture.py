"""Several data sets drawn as one, each with a share by its weight.

The row of an index is computed from the index alone, so a resumed run draws exactly the rows that it would have drawn. Indices are in
blocks of 1000: in each, every set has rows by its weight, e.g. 750 and 250 for weights of 3 and 1, rounded, but at least one, in an order
by the seed. A set begins again when all of its rows were drawn, in another order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from offbeat.config.data import DataConfig
from offbeat.data.dataset import EveryNth, PromptDataset
from offbeat.data.identity import digest_of
from offbeat.data.prompt import messages_of
from offbeat.data.row import Row

BLOCK = 1000
"""Indices of a block, which is also how many sets there may be."""


@dataclass(frozen=True, eq=False)
class RowsOfSet:
    """The rows of one of several sets: they know its name, and are chats where its [data] makes them chats."""

    dataset: PromptDataset
    name: str
    config: DataConfig

    @property
    def num_rows(self) -> int | None:
        return self.dataset.num_rows

    @property
    def digest(self) -> str:
        return digest_of([self.name, self.dataset.digest])

    def row(self, index: int) -> Row:
        row = self.dataset.row(index)
        chat = messages_of(row, self.config)
        return replace(
            row, prompt=row.prompt if chat is None else chat, of_set=self.name, template_kwargs=dict(self.config.chat_template_kwargs))

    def where(self, index: int) -> str:
        return f"{self.name}: {self.dataset.where(index)}"


@dataclass(frozen=True, eq=False)
class Mixture:
    """An endless data set of the rows of several, by their weights.

    Attributes:
        weights: of each set, above 0.
        shuffle: whether each set's rows come in an order by the seed, another one each time, or in the set's own order.
    """

    sets: Mapping[str, PromptDataset]
    weights: Mapping[str, float]
    seed: int
    shuffle: bool = True
    _orders: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    num_rows = None

    @property
    def digest(self) -> str:
        return digest_of([[name, self.weights[name], each.digest] for name, each in self.sets.items()] + [[self.seed, self.shuffle]])

    def row(self, index: int) -> Row:
        name, of_set = self.place(index)
        return self.sets[name].row(of_set)

    def where(self, index: int) -> str:
        name, of_set = self.place(index)
        return self.sets[name].where(of_set)

    def place(self, index: int) -> tuple[str, int]:
        """Return the set of an index, and the index of its row there."""
        names = tuple(self.sets)
        block, offset = divmod(index, BLOCK)
        counts = rows_of_block(tuple(self.weights[name] for name in names))
        order, ranks = _block(counts, self.seed, block)
        which = int(order[offset])
        drawn = block * counts[which] + int(ranks[offset])
        num_rows = self.sets[names[which]].num_rows
        if num_rows is None:
            return names[which], drawn
        epoch, position = divmod(drawn, num_rows)
        return names[which], int(self._order(which, epoch, num_rows)[position]) if self.shuffle else position

    def _order(self, which: int, epoch: int, num_rows: int) -> np.ndarray:
        if (which, epoch) not in self._orders:
            for old in [key for key in self._orders if key[0] == which and key[1] < epoch - 1]:
                del self._orders[old]
            self._orders[which, epoch] = np.random.default_rng([self.seed, which, epoch]).permutation(num_rows)
        return self._orders[which, epoch]


@lru_cache(maxsize=16)
def rows_of_block(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return the number of a block's rows of each set: its share by weight, rounded so that they add up to 1000, and at least one."""
    assert 0 < len(weights) <= BLOCK, f"from 1 to {BLOCK} sets can be mixed, got {len(weights)}"
    shares = np.array(weights) / sum(weights) * BLOCK
    counts = np.maximum(np.floor(shares), 1).astype(np.int64)
    while (missing := BLOCK - counts.sum()) != 0:
        # The set that lacks most of its share gets a row; one that has most beyond it, and more than one, gives one.
        lacks = shares - counts if missing > 0 else np.where(counts > 1, counts - shares, -np.inf)
        counts[int(np.argmax(lacks))] += 1 if missing > 0 else -1
    return tuple(int(count) for count in counts)


@lru_cache(maxsize=16)
def _block(counts: tuple[int, ...], seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return [B] int64, the set of each index of a block, and [B] int64, how many rows of it come before in the block."""
    order = np.random.default_rng([seed, block]).permutation(np.repeat(np.arange(len(counts)), counts))
    ranks = np.empty(len(order), np.int64)
    for which in range(len(counts)):
        mine = order == which
        ranks[mine] = np.arange(mine.sum())
    return order, ranks


def first_rows(dataset: PromptDataset) -> dict[str, Row]:
    """Return the first row of each set of a mixture, or of one that several processes share."""
    mixture = dataset.dataset if isinstance(dataset, EveryNth) else dataset
    assert isinstance(mixture, Mixture), "several data sets are opened as a mixture"
    return {name: rows.row(0) for name, rows in mixture.sets.items()}
