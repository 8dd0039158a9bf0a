"""Calls of user code: coroutines, blocking functions, errors with their line, cancellations."""

import asyncio
import sys
import threading
import time

import pytest

from offbeat.raised import place_of
from offbeat.user_code import calling as calls


def test_plain_functions_run_beside_the_loop_and_coroutines_on_it() -> None:
    async def name() -> str:
        return threading.current_thread().name

    async def main() -> None:
        start = time.monotonic()
        assert await asyncio.gather(*(calls.call(time.sleep, 0.3) for _ in range(50))) == [None] * 50
        assert time.monotonic() - start < 5
        assert await calls.call(name) == "MainThread"
        assert await calls.call(lambda: name()) == "MainThread"  # a function that returns a coroutine

    asyncio.run(main())


def test_errors_come_through_and_say_where_they_come_from() -> None:
    def fail() -> None:
        raise KeyError("x")

    def stop() -> None:
        raise StopIteration

    def leave_at_once() -> None:
        sys.exit(3)

    async def leave_from_a_coroutine() -> None:
        sys.exit(3)

    async def main() -> None:
        with pytest.raises(KeyError) as caught:
            await calls.call(fail)
        line = fail.__code__.co_firstlineno + 1
        assert str(calls.blame(caught.value, "f")) == f"f raised KeyError: 'x' at {place_of(caught.value)}"
        assert place_of(caught.value).endswith(f"test_calling.py, line {line}")
        with pytest.raises(Exception, match="StopIteration"):
            await calls.call(stop)
        for leave in (leave_at_once, leave_from_a_coroutine):  # in a task, as in its process, where it would end the loop
            with pytest.raises(calls.EndedError, match="SystemExit: 3"):
                await asyncio.create_task(calls.call(leave))

    asyncio.run(main())


def test_a_cancelled_call_waits_for_its_thread() -> None:
    async def main() -> None:
        end = threading.Event()
        calling = asyncio.create_task(calls.call(end.wait))
        await asyncio.sleep(0.05)
        calling.cancel()
        calling.cancel()
        await asyncio.sleep(0.1)
        assert not calling.done()
        end.set()
        with pytest.raises(asyncio.CancelledError):
            await calling

    asyncio.run(main())
