"""A run ends within its bound, whatever code of the user's own goes on: on the loop, on threads, and in whole processes."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import pytest

from offbeat import ending
from offbeat.ending import Threads, ended, place_of_task, run

HERE = str(Path(__file__).relative_to(Path.cwd()))
tasks: list[asyncio.Task[None]] = []
"""Of the test, so that they are not collected."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "END_S", 0.2)


async def stubborn() -> None:
    while True:
        with suppress(BaseException):
            await asyncio.sleep(60)


def test_what_a_run_returns_or_raises_is_passed_on_and_nothing_is_said() -> None:
    said: list[str] = []

    async def slow(value: int) -> int:
        return await asyncio.to_thread(lambda: value)

    async def fails() -> None:
        raise ValueError("as it was")

    assert run(slow(7), tell=said.append) == 7
    with pytest.raises(ValueError, match="as it was"):
        run(fails(), tell=said.append)
    assert said == []


def test_tasks_that_are_left_are_cancelled_and_clean_up() -> None:
    cleaned: list[str] = []

    async def worker() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append("up")

    async def main() -> None:
        tasks.append(asyncio.create_task(worker()))
        await asyncio.sleep(0)

    run(main())
    assert cleaned == ["up"]


def test_a_task_that_swallows_its_cancellation_and_a_thread_that_never_returns_are_named_and_left_behind() -> None:
    said: list[str] = []
    held = threading.Event()

    def waits() -> None:
        held.wait(60)

    async def main() -> str:
        tasks.extend((asyncio.create_task(stubborn()), asyncio.create_task(asyncio.to_thread(waits))))
        await asyncio.sleep(0.05)
        return "done"

    start = time.monotonic()
    assert run(main(), tell=said.append) == "done"
    held.set()
    assert time.monotonic() - start < 5
    task_line, thread_line = stubborn.__code__.co_firstlineno + 3, waits.__code__.co_firstlineno + 1
    assert said == ["code of your own did not end within 0.2 s after the run, and is left behind: "
                    f"a task at {HERE}, line {task_line}; a thread at {HERE}, line {thread_line}"]


def test_a_signal_shortens_the_wait_for_what_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "END_S", 60.0)

    async def main() -> None:
        tasks.append(asyncio.create_task(stubborn()))
        await asyncio.sleep(0)

    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    start = time.monotonic()
    run(main(), tell=lambda _text: None)
    assert time.monotonic() - start < 10


def test_a_background_task_that_calls_exit_does_not_end_the_run() -> None:
    said: list[str] = []

    async def leaves() -> None:
        sys.exit(3)

    async def main() -> str:
        task = asyncio.create_task(leaves())
        await asyncio.wait([task])
        return "done"

    assert run(main(), tell=said.append) == "done"
    (told,) = said
    assert told.startswith("a background task of your own ended with SystemExit: 3 at ") and "goes on without it" in told


def test_a_run_that_calls_exit_itself_exits() -> None:
    async def main() -> None:
        sys.exit(3)

    with pytest.raises(SystemExit):
        run(main())


def test_threads_run_at_once_what_an_event_loop_gives_them_and_no_more_than_their_number() -> None:
    threads = Threads()
    started, go = threading.Semaphore(0), threading.Event()

    def job() -> int:
        started.release()
        go.wait(10)
        return threading.get_ident()

    most = threads._max_workers
    futures: list[Future[int]] = [threads.submit(job) for _ in range(most + 3)]
    for _ in range(most):
        assert started.acquire(timeout=5)
    assert not started.acquire(timeout=0.05)
    go.set()
    assert len({future.result(5) for future in futures}) <= most
    assert threads.submit(lambda: "again").result(5) == "again"
    threads.shutdown()
    with pytest.raises(RuntimeError):
        threads.submit(job)


def test_a_task_of_nested_coroutines_is_where_its_innermost_own_frame_is() -> None:
    async def inner() -> None:
        await asyncio.sleep(60)

    async def outer() -> None:
        await inner()

    async def main() -> None:
        task = asyncio.create_task(outer())
        await asyncio.sleep(0)
        assert place_of_task(task) == f"a task at {HERE}, line {inner.__code__.co_firstlineno + 1}"
        assert await ended([task]) == []
        assert await ended([]) == []

    run(main())


@pytest.mark.parametrize(("body", "ended_by"), [
    ("threading.Thread(target=time.sleep, args=(60,)).start()", "a thread at"),
    ("atexit.register(time.sleep, 60)", "a function that was registered with atexit"),
    ("", "")])
def test_a_process_exits_within_its_bound_with_its_code(body: str, ended_by: str) -> None:
    program = f"""
import atexit, sys, threading, time
from offbeat.ending import exit_within
{body}
exit_within(3, seconds=0.2)
sys.exit(3)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert found.returncode == 3 and (f"did not exit within 0.2 s, and is ended: {ended_by}" in found.stderr) == bool(ended_by)
    assert bool(found.stderr) == bool(ended_by)
