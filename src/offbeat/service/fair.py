"""A queue that shares what is served over owners by cost, not by count: who sends large items, or many, does not keep others waiting.

Pure: start-time fair queueing (Goyal, Vin, Cheng 1996). Each owner has a virtual time that its served costs move on, and the owner
furthest behind comes next. While two owners both wait, what they were served differs by at most their largest items. An owner that was away
comes back at the present virtual time: idleness saves up nothing.
"""

from collections import deque
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of owners; first in, first out within each owner."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[tuple[int, T]]] = {}
        self._times: dict[str, int] = {}  # of those who wait, and of those who were served more than the present
        self._now = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def push(self, owner: str, cost: int, item: T) -> None:
        """Add an item; the cost, of 1 or more, is what serving it takes, in any unit."""
        if owner not in self._queues:
            self._queues[owner] = deque()
            self._times[owner] = max(self._now, self._times.get(owner, 0))
        self._queues[owner].append((cost, item))

    @property
    def owners(self) -> Collection[str]:
        """Those who wait."""
        return self._queues.keys()

    def pop(self, may: Callable[[str, T], bool] = lambda _owner, _item: True) -> T:
        """Take the item that is next.

        Args:
            may: whether an owner's first item can be served now; where it cannot, others' come before it, and it makes up for that later.

        Raises:
            LookupError: nothing waits that may be served.
        """
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
