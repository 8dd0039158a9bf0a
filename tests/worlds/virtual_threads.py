"""Threads of several simulated processes, of which one runs at a time, in virtual time.

A thread runs until it waits. Then one of those that can go on does so, by the world's number; where none can, time jumps to the next
deadline. What waits in the modules of SPMD ranks (`threading`, `queue`, `time`, event loops) is replaced by the classes here.
"""

import asyncio
import heapq
import math
import os
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, MutableSequence
from types import SimpleNamespace
from typing import Any

from worlds.virtual_time import LONGEST_S, VirtualLoop

OUTSIDE = -1
"""Rank of the thread that starts the ranks."""


class VirtualThread(threading.Thread):
    """A thread of one rank: that of the thread which has made it, if not given."""

    def __init__(
        self, *, target: Callable[..., object], args: Iterable[Any] = (), name: str = "", daemon: bool = True, rank: int | None = None,
    ) -> None:
        super().__init__(name=name, daemon=daemon)
        self.rank = threads().current.rank if rank is None else rank
        self.until: Callable[[], bool] = lambda: True
        self.deadline_s = math.inf
        self.turn = threading.Lock()
        self.turn.acquire()
        self._work = target, tuple(args)
        self.ended = False

    def start(self) -> None:
        """Start; it runs when another thread waits."""
        threads().running.append(self)
        super().start()

    def run(self) -> None:
        """Run the work in this thread's turns."""
        self.turn.acquire()
        work, args = self._work
        try:
            work(*args)
        finally:
            self.ended = True
            threads().leave(self)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        threads().wait(lambda: self.ended, timeout)


class VirtualThreads:
    """All threads of a life, its time, and the ranks that are dead or stopped.

    Attributes:
        now_s: virtual seconds since the start.
        wall_offset_s: by how much the wall clock was set.
        current: the thread that runs.
        dead: how the process of a rank has ended, e.g. {1: "was killed by SIGKILL"}.
        blocking_s: draws how long a blocking function takes.
        loops: event loops by rank.
    """

    def __init__(self, rng: random.Random, on_endless: Callable[[str], None]) -> None:
        """`on_endless` hears where all threads are once nothing can happen any more."""
        self.now_s = 0.0
        self.wall_offset_s = 0.0
        self.running: list[VirtualThread] = []
        self.dead: dict[int, str] = {}
        self.loops: dict[int, RankLoop] = {}
        self.blocking_s: Callable[[], float] = lambda: rng.expovariate(300)
        self._stopped_until_s: dict[int, float] = {}
        self._rng = rng
        self._on_endless = on_endless
        self._timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_timers = 0

    def adopt(self) -> None:
        """Let the thread that calls be the first one, outside of all ranks."""
        _Here.threads = self
        self.current = VirtualThread(target=lambda: None, rank=OUTSIDE)
        self.running.append(self.current)

    def time(self) -> float:
        """Return the time."""
        return self.now_s

    def call_at(self, when_s: float, function: Callable[..., None], *args: Any) -> None:
        """Call a function that does not wait, at a time."""
        self._num_timers += 1
        heapq.heappush(self._timers, (when_s, self._num_timers, function, args))

    def stop(self, rank: int, for_s: float) -> None:
        """Let a rank's process stand still."""
        self._stopped_until_s[rank] = self.now_s + for_s

    def is_stopped(self, rank: int) -> bool:
        """Whether a rank's process stands still."""
        return self._stopped_until_s.get(rank, -1.0) > self.now_s

    def wait(self, until: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Let others run until a condition holds or the time is up; returns whether it holds."""
        own = self.current
        if own.rank not in self.dead and until():
            return True
        own.until, own.deadline_s = until, math.inf if timeout_s is None else self.now_s + timeout_s
        following = self._next()
        if following is not own:
            self.current = following
            following.turn.release()
            own.turn.acquire()
        return until()

    def sleep(self, seconds: float) -> None:
        """Let others run for a time."""
        self.wait(lambda: False, seconds)

    def leave(self, own: VirtualThread) -> None:
        """End a thread and let another one run."""
        self.running.remove(own)
        self.current = self._next()
        self.current.turn.release()

    def _next(self) -> VirtualThread:
        while True:
            now_s = self.now_s
            ready = [
                each for each in self.running
                if each.rank not in self.dead and not self.is_stopped(each.rank) and (each.deadline_s <= now_s or each.until())]
            if ready:
                return ready[0] if len(ready) == 1 else self._rng.choice(ready)
            self._pass_time()

    def _pass_time(self) -> None:
        living = [each for each in self.running if each.rank not in self.dead]
        times = [max(each.deadline_s, self._stopped_until_s.get(each.rank, 0.0)) for each in living]
        times += [until_s for until_s in self._stopped_until_s.values() if until_s > self.now_s]
        next_s = min([*times, self._timers[0][0] if self._timers else math.inf])
        if next_s > LONGEST_S:
            how = "for two days" if next_s < math.inf else "without a deadline"
            self._on_endless(f"it waits {how}: {'; '.join(f'rank {each.rank} {each.name}' for each in living)}")
            os._exit(0)
        self.now_s = max(self.now_s, next_s)
        while self._timers and self._timers[0][0] <= self.now_s:
            _, _, function, args = heapq.heappop(self._timers)
            function(*args)


class _Here:
    threads: VirtualThreads


def threads() -> VirtualThreads:
    """Return the threads of this process's life."""
    return _Here.threads


def own_rank() -> int:
    """Return the rank whose thread runs."""
    return _Here.threads.current.rank


class VirtualEvent:
    """Stands in for `threading.Event`."""

    def __init__(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def wait(self, timeout: float | None = None) -> bool:
        return threads().wait(self.is_set, timeout)


class VirtualQueue:
    """Stands in for `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def empty(self) -> bool:
        return not self._items

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not threads().wait(lambda: bool(self._items), timeout if block else 0.0):
            raise queue.Empty
        return self._items.popleft()


class RankLoop(VirtualLoop):
    """A rank's event loop: where nothing is ready, other threads run."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.blocking_s = lambda: threads().blocking_s()

    @property
    def now_s(self) -> float:
        return threads().now_s

    @now_s.setter
    def now_s(self, _now_s: float) -> None:
        """Time is that of all threads."""

    def _run_once(self) -> None:
        if not self._ready:
            self._forget_cancelled()
            threads().wait(lambda: bool(self._ready), self._scheduled[0]._when - self.now_s if self._scheduled else None)
        asyncio.SelectorEventLoop._run_once(self)


class PerRank(MutableSequence[Any]):
    """A list of a module, one for each rank."""

    def __init__(self) -> None:
        self._lists: dict[int, list[Any]] = {}

    @property
    def _own(self) -> list[Any]:
        return self._lists.setdefault(own_rank(), [])

    def __getitem__(self, index: Any) -> Any:
        return self._own[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._own[index] = value

    def __delitem__(self, index: Any) -> None:
        del self._own[index]

    def __len__(self) -> int:
        return len(self._own)

    def insert(self, index: int, value: Any) -> None:
        """See `list.insert`."""
        self._own.insert(index, value)


THREADING = SimpleNamespace(
    Thread=VirtualThread, Event=VirtualEvent, Lock=threading.Lock, get_ident=threading.get_ident, current_thread=threading.current_thread,
    main_thread=threading.main_thread)
QUEUE = SimpleNamespace(SimpleQueue=VirtualQueue, Empty=queue.Empty)
