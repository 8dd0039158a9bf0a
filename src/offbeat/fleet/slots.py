"""One engine's adapters: what it holds, what may leave, what makes room, and in which order it is called. Used by `adapters`."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from offbeat.errors import BusyError

_LOADS_AT_ONCE = 4


class AdapterSlots:
    """What one engine holds and is about to.

    Attributes:
        held: names of the adapters that are loaded and proven; the least recently used first.
        coming: names that are being loaded, or wait for that.
        num_loading: of them, those that take room by now.
        in_use: requests that each adapter has there.
        leaving: old versions, to be unloaded with their last request.
        turns: bounds the loads that the engine is asked for at once.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: dict[str, None] = {}
        self.coming: Counter[str] = Counter()
        self.num_loading = 0
        self.in_use: Counter[str] = Counter()
        self.leaving: set[str] = set()
        self.turns = asyncio.Semaphore(min(_LOADS_AT_ONCE, capacity))
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def names(self) -> set[str]:
        """Names of all adapters whose folders the engine reads, or may read soon."""
        return {*self.held, *self.coming, *self.in_use}

    def lock(self, name: str) -> asyncio.Lock:
        """Return the lock under which an adapter is loaded or unloaded."""
        return self._locks.setdefault(name, asyncio.Lock())

    def put(self, name: str) -> None:
        """Make an adapter held, and the most recently used."""
        self.held.pop(name, None)
        self.held[name] = None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count one more load that takes room while the body runs."""
        self.num_loading += 1
        try:
            yield
        finally:
            self.num_loading -= 1

    def make_room(self) -> list[str]:
        """Take out what must be unloaded for those that are loading: the least recently used without requests.

        Raises:
            BusyError: too many are in use.
        """
        excess = max(len(self.held) + self.num_loading - self.capacity, 0)
        victims = [name for name in self.held if not self.in_use[name]][:excess]
        if len(victims) < excess:
            raise BusyError(f"all of the {self.capacity} adapters that an engine holds are in use")
        for name in victims:
            self.take_out(name)
        return victims

    def take_out(self, name: str) -> None:
        """Make an adapter no longer held."""
        self.held.pop(name, None)
        self.leaving.discard(name)

    def drained(self) -> list[str]:
        """Take out what leaves and has no request any more; gives the names."""
        names = [name for name in self.leaving if not self.in_use[name]]
        for name in names:
            self.take_out(name)
        return names

    def clear(self) -> None:
        """The engine has lost all that it held."""
        self.held.clear()
        self.leaving.clear()


@contextmanager
def counted(counter: Counter[str], name: str) -> Iterator[None]:
    """Count `name` once more while the body runs."""
    counter[name] += 1
    try:
        yield
    finally:
        counter[name] -= 1
        if not counter[name]:
            del counter[name]
