"""One thread beside an event loop."""

import asyncio
import threading
import time

import pytest

from offbeat.cluster.rank_thread import RankThread


def test_calls_run_one_at_a_time_in_order_in_one_thread_beside_the_loop() -> None:
    seen: list[tuple[int, int]] = []

    def call(number: int) -> int:
        time.sleep(0.02 if number == 0 else 0)
        seen.append((number, threading.get_ident()))
        return number * 10

    async def body() -> list[int]:
        thread = RankThread()
        try:
            return await asyncio.gather(*(thread.call(call, number) for number in range(3)))
        finally:
            thread.close()

    assert asyncio.run(body()) == [0, 10, 20]
    assert [number for number, _ in seen] == [0, 1, 2]
    assert len({ident for _, ident in seen}) == 1 and seen[0][1] != threading.get_ident()


def test_an_exception_comes_back_and_the_thread_goes_on() -> None:
    async def body() -> int:
        thread = RankThread()
        with pytest.raises(ZeroDivisionError):
            await thread.call(lambda: 1 // 0)
        result = await thread.call(lambda: 7)
        thread.close()
        return result

    assert asyncio.run(body()) == 7


def test_a_cancelled_call_holds_nobody_up_and_its_result_is_dropped() -> None:
    release = threading.Event()

    async def body() -> int:
        thread = RankThread()
        task = asyncio.create_task(thread.call(release.wait))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()
        result = await thread.call(lambda: 3)
        thread.close()
        return result

    assert asyncio.run(body()) == 3


def test_a_loop_may_end_before_its_calls_do() -> None:
    release, left = threading.Event(), threading.Event()

    def blocked() -> None:
        release.wait()
        left.set()

    async def body() -> None:
        thread = RankThread()
        task = asyncio.create_task(thread.call(blocked))
        await asyncio.sleep(0.05)
        task.cancel()

    asyncio.run(body())
    release.set()
    assert left.wait(5)
