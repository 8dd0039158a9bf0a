"""One engine's adapters, as the fleet knows them: what it holds, what may leave and what makes room. Decisions only, for `fleet`."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from offbeat.errors import BusyError


class Shelf:
    """What one engine holds and is about to.

    Attributes:
        held: loaded and proven; the least recently used first.
        coming: names that are being loaded, or wait for that.
        num_loading: of them, those that take room by now.
        in_use: requests that each adapter has there.
        leaving: old versions, to be unloaded with their last request.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: dict[str, None] = {}
        self.coming: Counter[str] = Counter()
        self.num_loading = 0
        self.in_use: Counter[str] = Counter()
        self.leaving: set[str] = set()

    @property
    def names(self) -> set[str]:
        """All that its engine reads the folder of, or may soon."""
        return {*self.held, *self.coming, *self.in_use}

    def put(self, name: str) -> None:
        """It is held, and the most recently used."""
        self.held.pop(name, None)
        self.held[name] = None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """One more takes room while the body runs."""
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
        """It is not held any more."""
        self.held.pop(name, None)
        self.leaving.discard(name)

    def drained(self) -> list[str]:
        """Take out what leaves and has no request any more."""
        names = [name for name in self.leaving if not self.in_use[name]]
        for name in names:
            self.take_out(name)
        return names


@dataclass(frozen=True)
class Book:
    """A shelf with what orders the calls to its engine.

    Attributes:
        slots: loads at once.
        locks: one at a time loads or unloads an adapter.
    """

    shelf: Shelf
    slots: asyncio.Semaphore
    locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    def lock(self, name: str) -> asyncio.Lock:
        return self.locks.setdefault(name, asyncio.Lock())


@contextmanager
def counted(counter: Counter[str], name: str) -> Iterator[None]:
    """Count `name` while the body runs."""
    counter[name] += 1
    try:
        yield
    finally:
        counter[name] -= 1
        if not counter[name]:
            del counter[name]
