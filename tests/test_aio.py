"""Waits: deadlines with a name, and groups of tasks that end together."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from offbeat.aio import HaltingClock, SideThread, Terminations, deadline, gather_all, run_beside, run_interruptible
from offbeat.errors import DeadlineError


class Sleeper:
    """Sleeps for ever and notes how that ended."""

    cancelled = False

    async def __call__(self) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def fail(after_s: float, text: str) -> None:
    await asyncio.sleep(after_s)
    raise ValueError(text)


async def value(number: int, after_s: float = 0.0) -> int:
    await asyncio.sleep(after_s)
    return number


def test_a_missed_deadline_names_the_wait_and_how_long_it_lasted() -> None:
    async def body() -> None:
        async with deadline("rank 3 to join", 0.05):
            await asyncio.sleep(60)

    with pytest.raises(DeadlineError, match=r"waiting for rank 3 to join passed its deadline of 0\.05 s \(waited \d+\.\d s\)"):
        asyncio.run(body())


def test_a_timeout_from_inside_is_not_taken_for_the_deadline() -> None:
    async def body() -> None:
        async with deadline("outer", 60):
            async with deadline("inner", 0.01):
                await asyncio.sleep(60)

    with pytest.raises(DeadlineError, match="waiting for inner"):
        asyncio.run(body())

    async def own() -> None:
        async with deadline("outer", 60):
            raise TimeoutError("a socket's")

    with pytest.raises(TimeoutError, match="a socket's") as caught:
        asyncio.run(own())
    assert not isinstance(caught.value, DeadlineError)


def test_a_cancelled_body_is_cancelled_and_not_late() -> None:
    async def body() -> None:
        async with deadline("work", 60):
            await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(body())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_gather_all_keeps_the_order() -> None:
    async def main() -> list[int]:
        return await gather_all(value(i, 0.02 - 0.004 * i) for i in range(5))

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


def test_gather_all_raises_the_first_error_and_leaves_nothing_running() -> None:
    sleeper = Sleeper()

    async def main() -> None:
        with pytest.raises(ValueError, match="first"):
            await gather_all([sleeper(), fail(0.01, "first"), fail(30, "second")])
        assert sleeper.cancelled
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_gather_all_cancels_everything_when_it_is_cancelled() -> None:
    sleeper = Sleeper()

    async def main() -> None:
        task = asyncio.create_task(gather_all([sleeper()]))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sleeper.cancelled

    asyncio.run(main())


def run_and_count_left(make: Callable[[], Awaitable[object]]) -> object:
    async def main() -> object:
        try:
            return await make()
        finally:
            assert len(asyncio.all_tasks()) == 1

    return asyncio.run(main())


def test_run_beside_gives_the_main_result_and_ends_the_watchers() -> None:
    sleeper = Sleeper()
    assert run_and_count_left(lambda: run_beside(value(7, 0.02), sleeper(), value(1))) == 7
    assert sleeper.cancelled


def test_a_watcher_that_raises_ends_the_main_work_with_its_own_error() -> None:
    sleeper = Sleeper()
    with pytest.raises(ValueError, match="too few engines"):
        run_and_count_left(lambda: run_beside(sleeper(), value(1), fail(0.01, "too few engines")))
    assert sleeper.cancelled


def test_an_error_of_the_main_work_is_raised_as_itself() -> None:
    with pytest.raises(ValueError, match="no batch"):
        run_and_count_left(lambda: run_beside(fail(0.01, "no batch"), Sleeper()()))


def test_a_side_thread_gives_results_and_errors_and_runs_everything_in_one_thread() -> None:
    let_go = threading.Event()

    async def main() -> None:
        side = SideThread("side")
        first = await side.run("first", threading.get_ident, timeout_s=60)
        assert await side.run("second", threading.get_ident, timeout_s=60) == first != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await side.run("third", lambda: 1 // 0, timeout_s=60)
        with pytest.raises(DeadlineError, match="waiting for a nap passed its deadline"):
            await side.run("a nap", lambda: let_go.wait(60), timeout_s=0.05)
        let_go.set()
        assert await side.run("after it", lambda: "awake", timeout_s=60) == "awake"
        side.close()

    asyncio.run(main())


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(3)])
def test_errors_that_event_loops_treat_in_their_own_way_reach_the_caller_of_a_side_thread(error: BaseException) -> None:
    def fail() -> None:
        raise error

    async def main() -> object:
        return await SideThread("side").run("odd", fail, timeout_s=5)

    with pytest.raises((RuntimeError, SystemExit), match="odd raised StopIteration|3"):
        asyncio.run(main())


def test_each_function_of_a_side_thread_runs_within_what_is_around_it() -> None:
    names: list[str] = []

    @contextmanager
    def around(name: str) -> Iterator[None]:
        names.append(f"{name} begins")
        yield
        names.append(f"{name} ends")

    async def main() -> None:
        side = SideThread("side", around=around)
        await side.run("first", lambda: names.append("first"))
        await side.run("second", lambda: names.append("second"))
        side.close()

    asyncio.run(main())
    assert names == ["first begins", "first", "first ends", "second begins", "second", "second ends"]


def test_a_stuck_side_thread_does_not_keep_the_process_from_ending() -> None:
    code = (
        "import asyncio, time\nfrom offbeat.aio import SideThread\n"
        "asyncio.run(SideThread('side').run('sleep', lambda: time.sleep(60), timeout_s=0.1))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert "waiting for sleep passed its deadline of 0.1 s" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_interruptible_ends_in_good_order(number: signal.Signals) -> None:
    ended = []

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), number)
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(number)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        run_interruptible(main())
    assert ended == [number] and signal.getsignal(number) == before
    assert run_interruptible(value(3)) == 3


def test_sigterm_that_comes_again_within_seconds_is_the_same_request() -> None:
    terminations = Terminations()
    asked = [terminations.asks(now_s=now_s) for now_s in (100.0, 100.1, 104.9, 105.1, 109.0, 110.2)]
    assert asked == [True, False, False, True, False, True]


def test_deadlines_stand_still_together_and_go_on_with_the_time_that_was_left() -> None:
    async def main() -> None:
        clock, loop = HaltingClock(), asyncio.get_running_loop()

        async def wait(seconds: float) -> float:
            with pytest.raises(DeadlineError, match=f"waiting for bread passed its deadline of {seconds:g} s"):
                async with deadline("bread", seconds, clock=clock):
                    await asyncio.sleep(60)
            return loop.time()

        start = loop.time()
        before = asyncio.create_task(wait(0.4))
        await asyncio.sleep(0.1)
        for _ in range(2):
            clock.halt()
        assert clock.halted
        meanwhile = asyncio.create_task(wait(0.2))
        await asyncio.sleep(0.5)
        assert not before.done() and not meanwhile.done()
        clock.go_on()
        assert not clock.halted
        assert await before - start >= 0.9 - 0.02 and await meanwhile - start >= 0.8 - 0.02

    asyncio.run(main())


def test_a_halt_leaves_bodies_alone_that_end_or_have_passed_their_deadline() -> None:
    async def main() -> None:
        clock = HaltingClock()
        async with deadline("bread", 60, clock=clock):
            clock.halt()
        clock.go_on()
        with pytest.raises(DeadlineError, match="waiting for bread"):
            async with deadline("bread", 0.01, clock=clock):
                try:
                    await asyncio.sleep(60)
                finally:
                    clock.halt()
                    clock.go_on()

    asyncio.run(main())
