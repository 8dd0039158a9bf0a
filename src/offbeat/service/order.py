"""Restores the order of numbered items that arrive in any order, without waiting forever for numbers that never come.

It is pure: times are given by the caller. Clients number their requests to a model and send them at once, so a later one may arrive
first, and a lost or refused request leaves a gap. Each item is returned once, and none is held back longer than the patience, or than one
before it takes that is known to be on its way.
"""

import math
from collections import Counter
from typing import Generic, NamedTuple, TypeVar

_MISSING = 2000
T = TypeVar("T")


class _Held(NamedTuple, Generic[T]):
    """State of a number: one item, or none if the number is skipped."""

    due: float
    items: tuple[T, ...]


class Numbers:
    """Numbers that are used up, each by an outcome of any kind. A number that is still missing is unused, although later ones are used."""

    def __init__(self, last: int) -> None:
        """All numbers up to `last`, the highest one that is used up, count as used."""
        self.last = last
        self._missing: set[int] = set()

    def use(self, number: int) -> None:
        # A client may skip any range of numbers at no cost to the server; numbers left out long ago count as used.
        self._missing.update(range(max(self.last + 1, number - _MISSING), number))
        self._missing.discard(number)
        self.last = max(self.last, number)
        if len(self._missing) > 2 * _MISSING:
            self._missing = set(sorted(self._missing)[-_MISSING:])

    def __contains__(self, number: int) -> bool:
        return number <= self.last and number not in self._missing


class Sequencer(Generic[T]):
    """Takes numbered items in any order and returns them in order; e.g. 2, 3, 1 give [], [], [1, 2, 3]."""

    def __init__(self, patience_s: float, next_seq: int = 1) -> None:
        """`patience_s` is the longest time for which an item is held back for missing ones; `next_seq` is the number of the first item."""
        self._patience_s = patience_s
        self._next = next_seq
        self._held: dict[int, _Held[T]] = {}
        self._coming: Counter[int] = Counter()

    @property
    def next_seq(self) -> int:
        """Lowest number that is still awaited."""
        return self._next

    @property
    def next_due(self) -> float | None:
        """Time at which `ready` returns more even without arrivals; None for never. Valid after a call of `ready`."""
        return min((held.due for seq, held in self._held.items() if seq < self._stop), default=None)

    @property
    def is_waiting(self) -> bool:
        """Whether items are held back for missing ones. Valid after a call of `ready`."""
        return bool(self._held)

    @property
    def _stop(self) -> float:
        """The lowest number that is certain to come, before which patience does not end; infinite if there is none."""
        return min((seq for seq in self._coming if seq >= self._next), default=math.inf)

    def expect(self, seq: int) -> None:
        """Note that the item of this number is certain to come or to be given up by `unexpect`; later ones wait for it without limit."""
        self._coming[seq] += 1

    def unexpect(self, seq: int, now: float) -> None:
        """Take back an `expect`; if the item has not come, it may be sent again, and the patience with it begins now."""
        self._coming[seq] -= 1
        if not self._coming[seq]:
            del self._coming[seq]
        due = now + self._patience_s
        self._held = {later: _Held(max(held.due, due) if later > seq else held.due, held.items) for later, held in self._held.items()}

    def offer(self, seq: int, item: T, now: float) -> None:
        """Take an item. If its number was already given up, the item is ready at once."""
        self._held[seq] = _Held(now + self._patience_s, (item,))

    def skip(self, seq: int, now: float) -> None:
        """Note that no item will come for this number. An item that has already come stays."""
        self._held.setdefault(seq, _Held(now + self._patience_s, ()))

    def ready(self, now: float) -> list[T]:
        """Return, in order, the items that may run: no earlier number is missing, or the patience with this or a later item has ended."""
        stop = self._stop
        overdue = (seq for seq, held in self._held.items() if held.due <= now and seq < stop)
        self._next = max((self._next, *overdue))
        while self._next in self._held:
            self._next += 1
        seqs = sorted(seq for seq in self._held if seq < self._next)
        return [item for seq in seqs for item in self._held.pop(seq).items]
