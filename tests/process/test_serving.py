"""What a child does with calls: one at a time, or on an event loop. All else about children is in `test_child`."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from offbeat.errors import DeadlineError, WorkerError
from offbeat.process.child import Child, ChildSpec

SUPPORT = str(Path(__file__).parents[1] / "support")


@asynccontextmanager
async def child_of(handler: str) -> AsyncIterator[Child]:
    path = os.pathsep.join(filter(None, (SUPPORT, os.environ.get("PYTHONPATH"))))
    child = await Child.start(ChildSpec("worker 3", f"handlers:{handler}", {"PYTHONPATH": path}), timeout_s=60)
    try:
        yield child
    finally:
        await child.kill()


def crowd() -> AbstractAsyncContextManager[Child]:
    return child_of("Crowd")


def test_sigterm_to_all_processes_of_a_job_leaves_a_child_to_its_parent() -> None:
    async def body() -> None:
        async with child_of("Echo") as child, crowd() as other:
            sleeping = asyncio.create_task(child.call("sleep", b"0.5", timeout_s=60))
            await asyncio.sleep(0.1)
            for each in (child, other):
                os.killpg(each.pid, signal.SIGTERM)
            assert await sleeping == b"" and await child.call("echo", b"here", timeout_s=60) == b"here"
            assert await other.call("sleep", b"0", timeout_s=60) == b"0"
            await child.stop(timeout_s=60)  # which a deadline and SIGKILL would follow
            assert child._process.returncode == 0

    asyncio.run(body())


def test_what_a_child_starts_still_ends_by_sigterm() -> None:
    async def body() -> None:
        async with child_of("Parent") as child:
            assert await child.call("start", timeout_s=60) == b"-15 -15"

    asyncio.run(body())


def test_calls_of_a_coroutine_run_at_the_same_time_and_are_answered_in_the_order_in_which_they_end() -> None:
    async def body() -> None:
        async with crowd() as child:
            order: list[bytes] = []

            async def call(seconds: bytes) -> None:
                order.append(await child.call("sleep", seconds, timeout_s=60))

            start = time.monotonic()
            await asyncio.gather(*(call(seconds) for seconds in (b"0.6", b"0.4", b"0.2")), *(call(b"0.6") for _ in range(100)))
            assert time.monotonic() - start < 10  # one after another, they would take a minute
            assert order[:2] == [b"0.2", b"0.4"]

    asyncio.run(body())


def test_a_call_of_a_coroutine_that_is_cancelled_or_late_in_the_parent_is_cancelled_in_the_child() -> None:
    async def body() -> None:
        async with crowd() as child:
            cancelled = asyncio.create_task(child.call("sleep", b"60", timeout_s=90))
            await asyncio.sleep(0)  # it is sent first, so it has begun when the next one is answered
            await child.call("sleep", b"0", timeout_s=60)
            cancelled.cancel()
            with pytest.raises(DeadlineError, match="sleep on worker 3 passed its deadline of 0.3 s"):
                await child.call("sleep", b"70", timeout_s=0.3)
            assert await child.call("ended", timeout_s=60) == b"0,60,70"
            at_once = asyncio.create_task(child.call("sleep", b"80", timeout_s=90))
            await asyncio.sleep(0)
            at_once.cancel()
            assert await child.call("sleep", b"0.1", timeout_s=60) == b"0.1"

    asyncio.run(body())


def test_an_error_of_a_coroutine_and_the_end_of_its_process_reach_each_caller() -> None:
    async def body() -> None:
        async with crowd() as child:
            with pytest.raises(WorkerError, match="worker 3 failed in nothing: KeyError") as caught:
                await child.call("nothing", timeout_s=60)
            assert "handlers.py" in caught.value.__notes__[0]
            calls = [asyncio.create_task(child.call("sleep", b"60", timeout_s=90)) for _ in range(3)]
            await asyncio.sleep(0.1)
            await child.kill()
            for call in calls:
                with pytest.raises(WorkerError, match="was killed by SIGKILL in sleep"):
                    await call

    asyncio.run(body())


def test_a_coroutine_that_blocks_its_event_loop_still_shows_where_it_is() -> None:
    async def body() -> None:
        async with crowd() as child:
            with pytest.raises(DeadlineError) as caught:
                await child.call("block", b"60", timeout_s=0.5)
            assert "time.sleep(float(payload))" in caught.value.__notes__[0]

    asyncio.run(body())


def test_a_child_is_stopped_after_the_calls_that_it_has() -> None:
    async def body() -> None:
        async with crowd() as child:
            call = asyncio.create_task(child.call("sleep", b"0.4", timeout_s=60))
            await asyncio.sleep(0.1)
            await child.stop(timeout_s=60)
            assert await call == b"0.4"

    asyncio.run(body())
