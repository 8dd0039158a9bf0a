"""One thread for all that blocks on a rank: training, and waiting for peers. The event loop beside it goes on with rollouts.

    the thread   consumes queued calls; produces their results; waits for the queue; woken by `call`

Calls run one at a time and in order, as collectives must. The thread is a daemon: a process whose loop has failed does not wait for a call
that waits for a peer.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_Call = tuple[Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]]


class RankThread:
    """Runs calls in order, for one event loop."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._pending = 0
        threading.Thread(target=self._run, name="rank", daemon=True).start()

    @property
    def idle(self) -> bool:
        """Whether no call runs or waits."""
        return self._pending == 0

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run it in the thread. One that is cancelled goes on there, and its result is dropped."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._pending += 1
        self._calls.put((partial(function, *args, **kwargs), loop, future))
        return await future

    def close(self) -> None:
        """End the thread after the calls that wait."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, loop, future = item
            try:
                deliver = partial(future.set_result, call())
            except BaseException as exc:
                deliver = partial(future.set_exception, exc)
            if loop.is_closed():  # the run has failed meanwhile
                return
            loop.call_soon_threadsafe(self._deliver, future, deliver)

    def _deliver(self, future: asyncio.Future[Any], deliver: Callable[[], None]) -> None:
        self._pending -= 1
        if not future.done():
            deliver()
