"""Limits how many callers use processes of user code at the same time. Used by the pool and by players that start programs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Waiting = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Waits for something, such as a place, and decides whether the time counts; see `on_the_clock`."""


async def on_the_clock(waiting: Awaitable[Any]) -> Any:
    """Return the result of `waiting`, whose time counts."""
    return await waiting


class Places:
    """A number of places, each for one episode or call."""

    def __init__(self, num: int) -> None:
        self._free = asyncio.Semaphore(num)

    @asynccontextmanager
    async def taken(self, off_the_clock: Waiting = on_the_clock) -> AsyncIterator[None]:
        """Hold a place during the body; `off_the_clock` waits for it, see `Episode.off_the_clock`."""
        await off_the_clock(self._free.acquire())
        try:
            yield
        finally:
            self._free.release()
