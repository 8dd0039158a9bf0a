"""An event loop whose time jumps to the next timer, and clocks, names and threads that follow it.

Only for a process that does nothing else: `install` replaces the functions of `time` and `secrets`, and what starts threads in the modules
of a run. Blocking functions run on the loop's own thread, some virtual milliseconds after they were handed over. The journal's writer keeps
its thread, but only one of the two ever runs: control passes to it where it has something to do, and back where it waits.
"""

import asyncio
import heapq
import queue
import random
import secrets
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Protocol

from offbeat.checkpoint import manifest
from offbeat.ending import place_of_task
from offbeat.fleet import engine_group
from offbeat.journal import writer
from offbeat.rollout import holdup
from offbeat.settling import settle
from offbeat.telemetry import record

LONGEST_S = 50 * 3600.0
"""Virtual seconds of one life after which it counts as waiting without end."""

_WALL_S = 1_800_000_000.0
_Thread = threading.Thread


class EndlessWaitError(BaseException):
    """Nothing will ever happen, or nothing has for days; says where every task is. No handler of the run may catch it."""


class _Unwatched(selectors.SelectSelector):
    """Sockets are never waited for: there are none."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return []


class _OrderedTask(asyncio.Task):
    """A task whose hash is its number, so that sets of tasks have the same order in each process."""

    def __init__(self, coro: Any, *, loop: Any, **named: Any) -> None:
        self.number = loop.next_number()
        super().__init__(coro, loop=loop, **named)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.SelectorEventLoop):
    """Where nothing is ready, `now_s` becomes the time of the next timer."""

    def __init__(self, rng: random.Random) -> None:
        self.now_s = 0.0
        self.wall_offset_s = 0.0
        self.blocking_s: Callable[[], float] = lambda: rng.expovariate(300)
        self._numbers = 0
        super().__init__(_Unwatched())
        self.set_task_factory(lambda loop, coro, **named: _OrderedTask(coro, loop=loop, **named))

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def time(self) -> float:
        return self.now_s

    def _write_to_self(self) -> None:
        """Wake nothing: no other thread runs."""

    def _run_once(self) -> None:
        if not self._ready:
            self._forget_cancelled()
            if self._scheduled:
                self.now_s = max(self.now_s, self._scheduled[0]._when)
            if self.now_s > LONGEST_S or not (self._scheduled or self._stopping):
                how = "for two days" if self._scheduled else "without a deadline"
                places = sorted(f"{task.get_name()}: {place_of_task(task)}" for task in asyncio.all_tasks(self) if not task.done())
                raise EndlessWaitError(f"it waits {how}: {'; '.join(places)[:2000]}")
        super()._run_once()

    def _forget_cancelled(self) -> None:
        while self._scheduled and self._scheduled[0]._cancelled:
            handle = heapq.heappop(self._scheduled)
            handle._scheduled = False
            self._timer_cancelled_count = max(self._timer_cancelled_count - 1, 0)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except BaseException as exc:
                future.set_exception(exc)

        self.call_later(self.blocking_s(), run)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        pass


class _Delayed(ThreadPoolExecutor):
    """Runs functions in order, each some virtual time after it was submitted, and the rest at its end."""

    own_loop: Callable[[], VirtualLoop]

    def __init__(self, *_args: Any) -> None:
        self._jobs: deque[Callable[[], None]] = deque()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self._jobs.append(lambda: settle(future, lambda: function(*args, **kwargs)))
        loop = self.own_loop()
        loop.call_later(loop.blocking_s(), self._run_one)
        return future

    def _run_one(self) -> None:
        if self._jobs:
            self._jobs.popleft()()

    def shutdown(self, *_args: Any, **_named: Any) -> None:
        while self._jobs:
            self._run_one()


class _InPlace(_Delayed):
    """Runs functions as they are submitted."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        settle(future, lambda: function(*args, **kwargs))
        return future

    def map(self, function: Callable[..., Any], *iterables: Any, **_named: Any) -> Any:
        return map(function, *iterables)


class _SideBySide(_Thread):
    """A thread that runs only while the loop's thread waits for it, and the other way round."""

    loop: VirtualLoop

    def __init__(self, *, target: Callable[[], None], name: str, daemon: bool) -> None:
        super().__init__(target=self._main, name=name, daemon=daemon)
        self._work = target
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._timer: asyncio.TimerHandle | None = None
        self.ended = False
        self.may_go: Callable[[], bool] = lambda: False

    def start(self) -> None:
        super().start()
        self.go_on()

    def go_on(self) -> None:
        """Let it run until it waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.ended:
            self._go.release()
            self._back.acquire()

    def wait(self, may_go: Callable[[], bool], timeout: float | None) -> bool:
        """Wait, on this thread, until `may_go()` when it is poked, or the time is up; returns `may_go()`."""
        if not may_go():
            self.may_go = may_go
            if timeout is not None:
                self._timer = self.loop.call_later(timeout, self.go_on)
            self._back.release()
            self._go.acquire()
        return may_go()

    def poke(self) -> None:
        """Let it look again, after the time that the disk takes."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self.loop.blocking_s(), self.go_on)

    def join(self, timeout: float | None = None) -> None:
        """Let it run to its end; its waits pass at once."""
        for _ in range(1000):
            if self.ended:
                return
            self.go_on()

    def _main(self) -> None:
        self._go.acquire()
        try:
            self._work()
        finally:
            self.ended = True
            self._back.release()


class _Jobs:
    """Stands in for `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._reader: _SideBySide | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._reader is not None:
            self._reader.poke()

    def get(self, timeout: float | None = None) -> Any:
        thread = threading.current_thread()
        assert isinstance(thread, _SideBySide), "the writer's thread"
        self._reader = thread
        arrived = thread.wait(lambda: bool(self._items), timeout)
        self._reader = None
        if not arrived:
            raise queue.Empty
        return self._items.popleft()


class _Flag:
    """Stands in for `threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._waiter: _SideBySide | None = None

    def set(self) -> None:
        self._set = True
        if self._waiter is not None:
            self._waiter.poke()

    def wait(self, timeout: float | None = None) -> bool:
        thread = threading.current_thread()
        assert isinstance(thread, _SideBySide), "the writer's thread"
        self._waiter = thread
        found = thread.wait(lambda: self._set, timeout)
        self._waiter = None
        return found


class _Policy(asyncio.DefaultEventLoopPolicy):
    own_loop: Callable[[], VirtualLoop]

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return self.own_loop()


def install(rng: random.Random) -> VirtualLoop:
    """Make the next event loop of this process a virtual one, and return it."""
    loop = _SideBySide.loop = VirtualLoop(rng)
    install_clocks(loop, lambda: loop, rng)
    writer.threading = SimpleNamespace(Thread=_SideBySide, Event=_Flag, Lock=threading.Lock)
    writer.queue = SimpleNamespace(SimpleQueue=_Jobs, Empty=queue.Empty)
    return loop


class Clock(Protocol):
    """Attributes are virtual seconds: since the start, and by how much the wall clock was set."""

    now_s: float
    wall_offset_s: float

    def time(self) -> float:
        """Return `now_s`."""
        ...


def install_clocks(clock: Clock, own_loop: Callable[[], VirtualLoop], rng: random.Random) -> None:
    """Replace the clocks and names of this process; `own_loop` returns the event loop of the thread that asks."""
    _Delayed.own_loop = _Policy.own_loop = staticmethod(own_loop)
    asyncio.set_event_loop_policy(_Policy())
    time.monotonic = time.perf_counter = clock.time
    time.time = lambda: _WALL_S + clock.wall_offset_s + clock.now_s
    time.time_ns = lambda: int(time.time() * 1e9)
    secrets.token_hex = lambda num_bytes=32: rng.randbytes(num_bytes).hex()
    secrets.token_urlsafe = secrets.token_hex
    record.ThreadPoolExecutor = _Delayed
    manifest.ThreadPoolExecutor = _InPlace
    engine_group._WATCH_INTERVAL_S = 10.0  # or a fifth of all events were looks at processes
    # The guard against user code that never awaits counts real time; it is off where the loop's thread is not the main one.
    holdup.threading = SimpleNamespace(current_thread=lambda: 1, main_thread=lambda: 2)


def tasks_left(loop: asyncio.AbstractEventLoop, own: Collection[Any]) -> list[str]:
    """Return where tasks are that have not ended, but for `own`."""
    return sorted(f"{task.get_name()} at {place_of_task(task)}" for task in asyncio.all_tasks(loop) if not task.done() and task not in own)
