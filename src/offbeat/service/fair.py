"""A queue that shares service fairly between owners by cost, not by count: an owner with large or many items does not delay the others.

It is pure and implements start-time fair queueing (Goyal, Vin, Cheng 1996). Each owner has a virtual time, which advances by the cost of
its served items; the owner with the lowest comes next. While two owners both wait, the costs served to them differ by at most their
largest items. An owner that was idle resumes at the current virtual time, so idle time earns no credit.
"""

from collections import deque
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

T = TypeVar("T")

May = Callable[[str, T], bool]
"""Whether an owner's item can be served now."""

Which = Callable[[T], bool]
"""Whether an item is of one kind."""


class FairQueue(Generic[T]):
    """Items of owners; first in, first out within each owner.

    For example, with a's items of cost 6 and 6 and b's of 2, 2 and 2, all waiting, the order is a, b, b, b, a.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[tuple[int, T]]] = {}
        self._times: dict[str, int] = {}  # of owners that wait, or are ahead of the current virtual time
        self._now = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def push(self, owner: str, cost: int, item: T) -> None:
        """Add an item; `cost` is the price of serving it in any unit, at least 1."""
        if owner not in self._queues:
            self._queues[owner] = deque()
            self._times[owner] = max(self._now, self._times.get(owner, 0))
        self._queues[owner].append((cost, item))

    @property
    def owners(self) -> Collection[str]:
        return self._queues.keys()

    def pop(self, may: May[T] = lambda _owner, _item: True) -> T:
        """Remove and return the next item that `may` be served; owners passed over catch up later. Raises LookupError if there is none."""
        ranking = sorted(self._queues, key=lambda name: self._times[name])
        owner = next((name for name in ranking if may(name, self._queues[name][0][1])), None)
        if owner is None:
            raise LookupError("nothing waits in the fair queue that may be served")
        cost, item = self._queues[owner].popleft()
        self._now = max(self._now, self._times[owner])
        self._times[owner] += cost
        if not self._queues[owner]:
            del self._queues[owner]
        for name in [name for name, time in self._times.items() if name not in self._queues and time <= self._now]:
            del self._times[name]
        return item

    def drop(self, owner: str, which: Which[T]) -> list[T]:
        """Remove an owner's waiting items of one kind, which are not served and cost nothing, and return them."""
        queue = self._queues.pop(owner, deque())
        kept = deque((cost, item) for cost, item in queue if not which(item))
        if kept:
            self._queues[owner] = kept
        return [item for _, item in queue if which(item)]
