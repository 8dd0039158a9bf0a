"""Waiting for what other threads and processes do, with an end."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], *, timeout_s: float = 60.0) -> None:
    """Wait beside the event loop until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (nothing wakes this: the condition is another thread's or process's)
            await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], object], *, timeout_s: float) -> None:
    """Wait until the condition holds.

    Raises:
        TimeoutError: it does not.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"the condition did not hold within {timeout_s:g} s")
        time.sleep(0.02)
