"""Named waits with deadlines. Every `await` that depends on another process goes through this module."""

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from offbeat import ending
from offbeat.errors import DeadlineError
from offbeat.settling import outcome_of

T = TypeVar("T")
U = TypeVar("U")


class HaltingClock:
    """Deadlines that stand still together, while the awaited work is halted on purpose."""

    def __init__(self) -> None:
        self.halted = False
        self._scopes: set[asyncio.Timeout] = set()
        self._left_s: dict[asyncio.Timeout, float] = {}

    def halt(self) -> None:
        """Have all deadlines stand still until `go_on`, those that begin in between included."""
        self.halted = True
        for scope in self._scopes:
            self._stop(scope)

    def go_on(self) -> None:
        """Have all deadlines go on with the time that each had left."""
        now_s = asyncio.get_running_loop().time()
        for scope, left_s in self._left_s.items():
            scope.reschedule(now_s + left_s)
        self.halted, self._left_s = False, {}

    @contextmanager
    def counting(self, scope: asyncio.Timeout) -> Iterator[None]:
        """Have the deadline of a scope that was entered stand still with the others, during the body."""
        self._scopes.add(scope)
        if self.halted:
            self._stop(scope)
        try:
            yield
        finally:
            self._scopes.discard(scope)
            self._left_s.pop(scope, None)

    def _stop(self, scope: asyncio.Timeout) -> None:
        if scope not in self._left_s and not scope.expired() and (when_s := scope.when()) is not None:
            self._left_s[scope] = when_s - asyncio.get_running_loop().time()
            scope.reschedule(None)


@asynccontextmanager
async def deadline(name: str, timeout_s: float, *, clock: HaltingClock | None = None) -> AsyncIterator[None]:
    """Limit the body to `timeout_s` seconds of a clock that may stand still; raises DeadlineError with the wait's name and length."""
    start = time.monotonic()
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            with clock.counting(scope) if clock is not None else nullcontext():
                yield
    except TimeoutError as exc:
        if not scope.expired():
            raise
        waited_s = time.monotonic() - start
        raise DeadlineError(f"waiting for {name} passed its deadline of {timeout_s:g} s (waited {waited_s:.1f} s)") from exc


ASKED_TO_STOP = "asked to stop; this step is the last, and another SIGTERM, 5 s from now or later, ends the run at once"
"""A run's message at SIGTERM."""

STOPPING = "stopping after this step"
"""A run's words at an interrupt, which `FINISHING` replaces where no step is left."""

FINISHING = "all steps are done, and the run ends once what follows the last one is done"
"""A run's words at an interrupt after its last step."""

PRESSED = f"{STOPPING}; press Ctrl-C again to stop at once"
"""A run's message at the first Ctrl-C."""

ONE_REQUEST_S = 5.0
"""Seconds after a SIGTERM within which another one is the same request."""

End = Callable[[str], None]
"""Asks a run to end, with a message such as `PRESSED`. Called on the run's own thread."""


class Terminations:
    """Tells a new SIGTERM from a repeated one.

    A scheduler sends it to all processes of a job: a run gets it, and once more from the batch script or the torchrun that passes it on.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None

    def asks(self, *, now_s: float) -> bool:
        """Note that a SIGTERM has come at this time, of `time.monotonic`; whether it is a new request."""
        if self._last_s is not None and now_s - self._last_s < ONE_REQUEST_S:
            return False
        self._last_s = now_s
        return True


def listen_to_signals(loop: asyncio.AbstractEventLoop, end: End) -> None:
    """Call `end` at each SIGINT and each new SIGTERM; for the main thread only."""
    terminations = Terminations()

    def terminate() -> None:
        if terminations.asks(now_s=time.monotonic()):
            end(ASKED_TO_STOP)

    loop.add_signal_handler(signal.SIGINT, end, PRESSED)
    loop.add_signal_handler(signal.SIGTERM, terminate)


listener: ContextVar[Callable[[asyncio.AbstractEventLoop, End], None]] = ContextVar("listener", default=listen_to_signals)
"""Called when a run begins, with its loop and the function that ends it. A program sets another one on a thread, which gets no signals."""


def run_interruptible(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, but SIGINT, SIGTERM or `listener` cancel the coroutine, so that it cleans up; then raises KeyboardInterrupt."""

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "runs inside a task"

        def cancel(_how: str) -> None:
            task.cancel()

        listener.get()(loop, cancel)
        return await main

    try:
        return ending.run(cancellable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


class SideThread:
    """A thread that runs blocking functions one after another. A function that never returns does not keep the process from exiting.

    The thread lives until `close`: on Linux, a child started with a parent-death signal dies with the *thread* that started it.
    """

    def __init__(self, name: str, *, around: Callable[[str], AbstractContextManager[None]] = lambda _name: nullcontext()) -> None:
        """Start the thread, which enters `around(name)` around each function."""
        self._around = around
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._working = False
        threading.Thread(target=self._work, name=name, daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether no function is running or queued."""
        return not self._working and self._jobs.empty()

    async def run(self, name: str, function: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Return the result of `function()`.

        If the wait times out or is cancelled, the function still runs to its end and its result is dropped.

        Without `timeout_s`, the function's waits have deadlines of their own.

        Raises:
            DeadlineError: the function has not returned within `timeout_s` seconds.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def call() -> T:
            with self._around(name):
                return function()

        def tell(outcome: "Future[T]") -> None:
            if future.done():
                return
            match outcome.exception():
                case None:
                    future.set_result(outcome.result())
                case StopIteration():  # asyncio's futures refuse it, and the caller would wait for ever
                    future.set_exception(RuntimeError(f"{name} raised StopIteration"))
                case error:
                    future.set_exception(error)

        def job() -> None:
            outcome = outcome_of(call)
            with suppress(RuntimeError):  # the loop is closed, so nobody is waiting any more
                loop.call_soon_threadsafe(tell, outcome)

        self._jobs.put(job)
        async with deadline(name, timeout_s) if timeout_s is not None else nullcontext():
            return await future

    def close(self) -> None:
        """End the thread once the functions queued so far have run."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._working = True
            job()
            self._working = False


async def gather_all(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Await all of them concurrently; the first error cancels the others and is raised as itself, not in a group."""
    tasks = [asyncio.ensure_future(a) for a in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def both(first: Awaitable[T], second: Awaitable[U]) -> tuple[T, U]:
    """`gather_all` of two awaitables of different types."""
    one, two = await gather_all([cast(Awaitable[Any], first), cast(Awaitable[Any], second)])
    return one, two


@asynccontextmanager
async def beside(*watchers: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Run the watchers while the body runs. If a watcher raises, the body is cancelled and the watcher's error is raised, not in a group.

    If the body raises an error of its own as well, that one is raised instead.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(watcher) for watcher in watchers]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[-1] from None  # the body's error comes last


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task whose result nobody needs any more, and return when it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def run_beside(main: Coroutine[Any, Any, T], *watchers: Coroutine[Any, Any, Any]) -> T:
    """Run `main` to its end while the watchers run; a watcher that raises cancels `main`, and its error is raised as itself."""
    async with beside(*watchers):
        return await main


async def unless(event: asyncio.Event, main: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `main`, or None if the event is set first; `main` is cancelled then."""
    task, happens = asyncio.ensure_future(main), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, happens), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
        return None if task.cancelled() and happens.done() else task.result()
    finally:
        for each in (task, happens):
            await cancelled(each)
