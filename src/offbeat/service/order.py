"""Puts what arrives in any order back into the order of its numbers, and does not wait for ever for numbers that never come.

Pure: times are given. Clients number their requests to a model and send them at once, so a later one may arrive first; and a request
that was lost or refused leaves a gap. Each item is given once, and none is held back longer than the patience.
"""

from typing import Generic, NamedTuple, TypeVar

_MISSING = 2000
T = TypeVar("T")


class _Held(NamedTuple, Generic[T]):
    """What came for a number: one item, or none if it is skipped."""

    due: float
    items: tuple[T, ...]


class Numbers:
    """Which numbers have been used up: each by an outcome, whatever became of it. One that came late has not, though later ones have.

    Attributes:
        last: the highest one that has been.
    """

    def __init__(self, last: int) -> None:
        """`last` was used before, and what is below it counts as used, too."""
        self.last = last
        self._missing: set[int] = set()

    def use(self, number: int) -> None:
        """This one is used up."""
        # A client may jump as far as it likes, at no cost; what it left out long ago counts as used.
        self._missing.update(range(max(self.last + 1, number - _MISSING), number))
        self._missing.discard(number)
        self.last = max(self.last, number)
        if len(self._missing) > 2 * _MISSING:
            self._missing = set(sorted(self._missing)[-_MISSING:])

    def __contains__(self, number: int) -> bool:
        return number <= self.last and number not in self._missing


class Sequencer(Generic[T]):
    """Items with numbers in, the same items in order out."""

    def __init__(self, patience_s: float, next_seq: int = 1) -> None:
        """Args:
            patience_s: how long an item is held back for missing ones before it.
            next_seq: the number of the first item.
        """
        self._patience_s = patience_s
        self._next = next_seq
        self._held: dict[int, _Held[T]] = {}

    @property
    def next_seq(self) -> int:
        """The lowest number that is still waited for."""
        return self._next

    @property
    def next_due(self) -> float | None:
        """When `ready` will give more although nothing arrives; None if it will not. To be asked after `ready`."""
        return min((held.due for held in self._held.values()), default=None)

    def offer(self, seq: int, item: T, now: float) -> None:
        """Take an item. One whose number was given up already is ready at once."""
        self._held[seq] = _Held(now + self._patience_s, (item,))

    def skip(self, seq: int, now: float) -> None:
        """Take note that nothing will come for this number. An item that did come stays."""
        self._held.setdefault(seq, _Held(now + self._patience_s, ()))

    def ready(self, now: float) -> list[T]:
        """Give, in order, the items that may run: no number before them is missing, or the patience of one at or behind them has ended."""
        overdue = (seq for seq, held in self._held.items() if held.due <= now)
        self._next = max((self._next, *overdue))
        while self._next in self._held:
            self._next += 1
        seqs = sorted(seq for seq in self._held if seq < self._next)
        return [item for seq in seqs for item in self._held.pop(seq).items]
