"""Runs the parsing of large bodies and the writing of large answers off the event loop. Used by `app` and its routes.

Python computes on one thread at a time, and a computing thread lets the event loop run every few milliseconds. So there are few threads,
and each owner uses at most one of them.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

Beside = Callable[..., T]
"""A function that is called on a thread beside the event loop."""

SMALL_BYTES = 1 << 15
"""Size up to which a body is parsed on the event loop, which never takes more than about 10 ms."""


class Readers:
    """A few threads for parsing and writing."""

    def __init__(self, num_threads: int = 2) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="reader")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, owner: str, function: Beside[T], *args: Any, **kwargs: Any) -> T:
        """Return the result of a function, run on a thread after its owner's earlier ones."""
        turn = self._turns.get(owner) or asyncio.Lock()
        self._turns[owner] = turn
        async with turn:
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))
