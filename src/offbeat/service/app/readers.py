"""Reading large bodies, and writing large answers, beside the event loop, so that other requests do not wait. Used by `app` and its routes.

Python computes on one thread at a time, and a thread that computes lets the event loop have its turn every few milliseconds. So there are
few threads, and an owner has one of them at most.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

SMALL_BYTES = 1 << 15
"""Of a body that is read at once: in no form does that take more than about 10 ms."""
_THREADS = 2


class Readers:
    """A few threads."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="reader")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, owner: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """What a function gives, on a thread, when its owner's earlier ones are done."""
        turn = self._turns.get(owner) or asyncio.Lock()
        self._turns[owner] = turn
        async with turn:
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))
