"""Runs coroutines so that they end within a bound, although code of the user's own, which they call, does not.

A task may swallow its cancellation (a bare `except:` in a retry loop), and a function on a thread may never return. Neither keeps a run
from ending: tasks and threads that have not ended in time are named with a place, as "a task at agent.py, line 12", and left behind.
"""

import asyncio
import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from signal import SIGINT, SIGTERM
from types import FrameType
from typing import Any, TypeVar

from offbeat.raised import describe_at, place_in
from offbeat.settling import settle
from offbeat.types import Tell

T = TypeVar("T")

END_S = 10.0
"""Seconds that code of the user's own has to end when it is asked to."""

EXIT_S = 20.0
"""Seconds within which a process exits after its last output."""

_LOOK_S = 0.02


class Threads(ThreadPoolExecutor):
    """Threads for an event loop's blocking functions. One that never returns does not keep the process from exiting."""

    def __init__(self) -> None:
        super().__init__(max_workers=min(32, (os.cpu_count() or 1) + 4))  # as many as an event loop has by default
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._own: list[threading.Thread] = []
        self._busy: set[threading.Thread] = set()
        self._closed = False

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        future: Future[T] = Future()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                settle(future, partial(function, *args, **kwargs))

        with self._lock:
            if self._closed:
                raise RuntimeError("the event loop of these threads has ended")
            self._jobs.put(job)
            if not self._idle.acquire(blocking=False) and len(self._own) < self._max_workers:
                thread = threading.Thread(target=self._work, name=f"blocking call {len(self._own)}", daemon=True)
                self._own.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Let the threads end after the functions that were submitted; never waits for one that does not return."""
        with self._lock:
            self._closed = True
            for _ in self._own:
                self._jobs.put(None)

    @property
    def busy(self) -> list[threading.Thread]:
        """Threads in which a function has not returned."""
        return [*self._busy]

    def _work(self) -> None:
        own = threading.current_thread()
        while (job := self._jobs.get()) is not None:
            self._busy.add(own)
            job()
            del job  # with the objects that it refers to
            self._busy.discard(own)
            self._idle.release()


def run(main: Coroutine[Any, Any, T], *, tell: Tell = lambda text: print(f"offbeat: {text}", file=sys.stderr)) -> T:
    """Like `asyncio.run`, but tasks and threads left when `main` has ended have `END_S` seconds to end, or less at SIGINT or SIGTERM.

    A background task of the user's that calls `sys.exit` does not end `main`.

    `tell` is called with a sentence about tasks and threads that did not end, or a task that called `sys.exit`.
    """
    loop, threads = asyncio.new_event_loop(), Threads()
    loop.set_default_executor(threads)
    asyncio.set_event_loop(loop)
    try:
        return _run_to_end(loop, loop.create_task(main), tell)
    finally:
        try:
            if left := loop.run_until_complete(_end(loop, threads)):
                tell(f"code of your own did not end within {END_S:g} s after the run, and is left behind: {'; '.join(left)}")
        finally:
            loop.set_exception_handler(lambda _loop, _context: None)  # the default one would complain of tasks that were left behind
            asyncio.set_event_loop(None)
            loop.close()


def _run_to_end(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[T]", tell: Tell) -> T:
    while True:
        try:
            return loop.run_until_complete(task)
        except SystemExit as exc:
            if task.done():
                raise
            tell(f"a background task of your own ended with {describe_at(exc)}; the run goes on without it")


async def _end(loop: asyncio.AbstractEventLoop, threads: Threads) -> list[str]:
    """Cancel all tasks and let the threads end; returns the places of those that have not ended in time."""
    hurried = False

    def hurry() -> None:
        nonlocal hurried
        hurried = True

    if threading.current_thread() is threading.main_thread():
        for number in (SIGINT, SIGTERM):
            loop.add_signal_handler(number, hurry)
    tasks = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
    for task in tasks:
        task.cancel()
    threads.shutdown()
    closing = asyncio.create_task(loop.shutdown_asyncgens())
    give_up_s = time.monotonic() + END_S
    while (running := [task for task in (*tasks, closing) if not task.done()]) or threads.busy:
        if hurried or time.monotonic() > give_up_s:
            break
        await asyncio.sleep(_LOOK_S)
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            loop.call_exception_handler({"message": "a task failed while the run ended", "exception": error, "task": task})
    left = [task for task in running if task is not closing]
    _leave_behind(left)
    return [*map(place_of_task, left), *map(place_of_thread, threads.busy)]


async def ended(tasks: Iterable["asyncio.Task[Any]"], *, within_s: float = END_S) -> list["asyncio.Task[Any]"]:
    """Cancel tasks and wait until they have ended, with any error; returns the tasks that have not within the time."""
    waited = [*tasks]
    for task in waited:
        task.cancel()
    if not waited:
        return []
    _, left = await asyncio.wait(waited, timeout=within_s)
    _leave_behind(left)
    return [*left]


def _leave_behind(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Keep tasks for ever: the garbage collector closes coroutines, and one that swallows everything would loop there."""
    for task in tasks:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))


def place_of_task(task: "asyncio.Task[Any]") -> str:
    """Return where a task is, as in "a task at agent.py, line 12"."""
    return f"a task at {place_in(_frames_of(task.get_coro())) or 'an unknown place'}"


def place_of_thread(thread: threading.Thread) -> str:
    """Return where a thread is, as in "a thread at agent.py, line 12"."""
    frame = sys._current_frames().get(thread.ident or 0)
    frames = [] if frame is None else [*traceback.walk_stack(frame)]
    return f"a thread at {place_in(reversed(frames)) or thread.name}"


def _frames_of(waiting: object) -> Iterator[tuple[FrameType, int]]:
    """The frames of a suspended coroutine, outermost first."""
    while waiting is not None:
        for kind in ("cr", "ag", "gi"):
            frame = getattr(waiting, f"{kind}_frame", None)
            if isinstance(frame, FrameType):
                yield frame, frame.f_lineno
                break
        waiting = next((inner for name in ("cr_await", "ag_await", "gi_yieldfrom") if (inner := getattr(waiting, name, None))), None)


def exit_within(code: int, *, seconds: float = EXIT_S) -> None:
    """End this process with `code` unless it has exited by itself in so many seconds; says which threads it would have waited for."""

    def leave_late() -> None:
        time.sleep(seconds)
        others = [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
        places = "; ".join(map(place_of_thread, others)) or "a function that was registered with atexit"
        sys.stderr.write(f"offbeat: the process did not exit within {seconds:g} s, and is ended: {places}\n")
        sys.stderr.flush()
        os._exit(code)

    threading.Thread(target=leave_late, name="exit", daemon=True).start()
