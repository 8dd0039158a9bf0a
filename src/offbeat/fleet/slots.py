"""The adapters of one engine: the ones it holds, the ones to unload, and the order of loads. Used by `adapters`."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from offbeat.errors import BusyError

_LOADS_AT_ONCE = 4
"""Number of loads that an engine does at once: each takes time from generation."""


class AdapterSlots:
    """The adapters that one engine holds, loads and unloads.

    Attributes:
        held: names of the adapters that are loaded and proven, the least recently used first.
        coming: number of callers that are loading each adapter or wait to, by name.
        num_loading: number of loads that have begun and take room; waiting ones take none.
        in_use: number of requests that use each adapter on this engine, by name.
        leaving: names of old versions, each to be unloaded after its last request.
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
        """Note that the engine holds an adapter, and that it is the most recently used one."""
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
        """Choose adapters to unload, so that the loading ones fit: the least recently used ones without requests.

        They no longer count as held, and the caller unloads them. With a capacity of 4, 3 held and 2 loading, one has to go.

        Raises:
            BusyError: too many adapters are in use.
        """
        excess = max(len(self.held) + self.num_loading - self.capacity, 0)
        victims = [name for name in self.held if not self.in_use[name]][:excess]
        if len(victims) < excess:
            raise BusyError(f"all of the {self.capacity} adapters that an engine holds are in use")
        for name in victims:
            self.take_out(name)
        return victims

    def take_out(self, name: str) -> None:
        """Note that the engine does not hold an adapter any more."""
        self.held.pop(name, None)
        self.leaving.discard(name)

    def drained(self) -> list[str]:
        """Return the adapters that are to leave and have no request any more; they no longer count as held."""
        names = [name for name in self.leaving if not self.in_use[name]]
        for name in names:
            self.take_out(name)
        return names

    def clear(self) -> None:
        """Note that the engine has lost all adapters."""
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
