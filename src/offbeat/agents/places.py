"""Limits how many episodes are played at the same time. Used by every player that runs episodes in processes of their own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from offbeat.rollout.episode import Waiting, on_the_clock


class Places:
    """A number of places, each for one episode."""

    def __init__(self, num: int) -> None:
        self._free = asyncio.Semaphore(num)

    @asynccontextmanager
    async def taken(self, off_the_clock: Waiting = on_the_clock) -> AsyncIterator[None]:
        """Hold a place during the body.

        Args:
            off_the_clock: waits for it; see `Episode.off_the_clock`.
        """
        await off_the_clock(self._free.acquire())
        try:
            yield
        finally:
            self._free.release()
